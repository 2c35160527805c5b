"""Try a wheel as a user gets it: install it into a fresh environment, train and evaluate there.

Torch and the packages it needs are linked from this environment, since they take minutes to
install. pip installs everything else from what the wheel says it needs, so a requirement that the
wheel does not name is missed here.

    python tools/smoke.py dist/samestep-VERSION-py3-none-any.whl
    python tools/smoke.py --lowest    # the source, with the lowest version of each package it needs
"""

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Collection, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

SOURCE = Path(__file__).parent.parent / "src"
STEPS = "3"


def main() -> None:
    """Try what the command line names; a failure ends with a traceback."""
    with tempfile.TemporaryDirectory() as place:
        fresh = Fresh(Path(place).resolve())
        if sys.argv[1] == "--lowest":
            what = f"the lowest versions: {' '.join(fresh.install_lowest())}"
        else:
            what = fresh.install_wheel(Path(sys.argv[1]).resolve())
        expect("train", fresh.samestep("--help"))
        fresh.samestep("train", "spiral", "--max-steps", STEPS, "--run-dir", "run")
        expect("accuracy", fresh.samestep("evaluate", "run"))
        expect("set_epoch", fresh.samestep("check", "--list", "SS103"))
        expect("report.html", fresh.samestep("report", "run"))
        fresh.samestep("new", "classification", "mine.py")
        fresh.samestep("train", "mine.py", "--max-steps", STEPS)
    print(f"{what}: installed into a fresh environment, trained and evaluated")


def check_content(wheel: Path) -> None:
    """Compare the wheel with the source: every file of the package, the licence, nothing else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    # The pages of the handbook that the package holds are in a folder that is a link.
    ours = {
        os.path.relpath(Path(folder, name), SOURCE)
        for folder, _, files in os.walk(SOURCE / "samestep", followlinks=True)
        for name in files
        if not name.endswith(".pyc")
    }
    different = {name for name in names if ".dist-info/" not in name} ^ ours
    if different:
        raise SystemExit(f"the wheel and {SOURCE} differ in {sorted(different)}")
    if not any(re.fullmatch(r"samestep-.*\.dist-info/licenses/LICENSE", name) for name in names):
        raise SystemExit("the wheel has no LICENSE")
    expect("samestep/py.typed", "\n".join(names))


class Fresh:
    """A virtual environment of its own, and a working directory outside of the source."""

    def __init__(self, place: Path) -> None:
        self.home = place / "venv"
        venv.create(self.home, with_pip=True)
        paths = {"base": str(self.home), "platbase": str(self.home)}
        self.packages = Path(sysconfig.get_path("purelib", "venv", paths))
        self.work = place / "work"
        self.work.mkdir()

    def install_wheel(self, wheel: Path) -> str:
        """Install a wheel and what it says it needs; return the wheel's name."""
        check_content(wheel)
        self.python("-m", "pip", "install", "--quiet", "-c", self.link("torch"), str(wheel))
        self.python("-m", "pip", "check")
        imported = self.python("-c", "import samestep; print(samestep.__file__)")
        expect(str(self.packages / "samestep"), imported)
        expect(wheel.name.split("-")[1], self.samestep("--version"))
        return wheel.name

    def install_lowest(self) -> list[str]:
        """Install the lowest version of each package that samestep needs, and samestep's source.

        Torch alone is the one of this environment: old builds for the CPU are not on PyPI.
        """
        project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
        lowest = [text.replace(">=", "==") for text in project["dependencies"]]
        own = [text for text in lowest if not text.startswith("torch=")]
        constraints = self.link("torch", leave_out={Requirement(text).name for text in own})
        self.python("-m", "pip", "install", "--quiet", "-c", constraints, *own)
        (self.packages / "samestep.pth").write_text(str(SOURCE))
        program = self.home / "bin" / "samestep"
        program.write_text(
            f"#!{self.home}/bin/python\nimport sys\n"
            "from samestep.shell.cli import main\nsys.exit(main())\n"
        )
        program.chmod(0o755)
        return own

    def link(self, name: str, leave_out: Collection[str] = ()) -> str:
        """Link a package and all that it needs; return pip's constraints that hold them."""
        held = {}
        for found in needed(name, {}):
            if found.name.lower() in leave_out:
                continue
            held[found.name] = found.version
            for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                link = self.packages / top
                if not link.exists():
                    link.symlink_to(Path(str(found.locate_file(top))))
        constraints = self.work / "constraints.txt"
        constraints.write_text("".join(f"{name}=={held[name]}\n" for name in held))
        return str(constraints)

    def python(self, *arguments: str) -> str:
        """Run the environment's Python; return what it printed."""
        return self._run("python", *arguments)

    def samestep(self, *arguments: str) -> str:
        """Run the environment's `samestep`; return what it printed."""
        return self._run("samestep", *arguments)

    def _run(self, program: str, *arguments: str) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [str(self.home / "bin" / program), *arguments]
        done = subprocess.run(
            command,
            cwd=self.work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout


def needed(name: str, seen: dict[str, Distribution]) -> Iterator[Distribution]:
    """Yield an installed package and the installed packages that it needs, each once."""
    if name not in seen:
        seen[name] = distribution(name)
        yield seen[name]
        for requirement in map(Requirement, seen[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield from needed(requirement.name, seen)


def expect(part: str, text: str) -> None:
    """End with a message if a text lacks a part."""
    if part not in text:
        raise SystemExit(f"{part!r} is missing in:\n{text}")


if __name__ == "__main__":
    main()
