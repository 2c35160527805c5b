"""Gather what a machine with a GPU needs to check and measure samestep without a network.

The kit is one folder: the code, wheels of the packages that the machine lacks, and a sample of real
data. Its size is limited, since it is copied to machines that are lent for half an hour.

    make gpu-kit [PROBE=probe.json] [DATA=DIR]
"""

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".gpu-kit"
MOST_BYTES = 40 << 20
PYTHON = "3.12"
DATA_FILES = ("cifar10-jpeg.tar.xz", "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
"""What is taken of DATA: all of CIFAR-10 as JPEG, train/CLASS/*.jpg and test/CLASS/*.jpg, and the
10,000 test digits of MNIST. tools/gpu_data.py unpacks them there."""

USUALLY_THERE = Path(__file__).with_name("gpu_machine.txt")
"""Packages that a machine with an image for deep learning has; a probe of it says them exactly."""

EXTRAS = ("images", "lightning")
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist")
NEVER = re.compile(r"torch|torchvision|torchaudio|triton|cuda-.*|nvidia-.*")
"""What the kit never carries: it belongs to the machine's CUDA, and is larger than any kit."""

_MARKERS = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "extra": "",
}
_PLATFORMS = tuple(f"manylinux{v}_x86_64" for v in ("_2_28", "_2_27", "_2_17", "2014", "1"))

Fetch = Callable[[Requirement], Path]
"""Fetches the wheel of a requirement, without what it needs, and returns its path."""


class KitError(Exception):
    """The kit cannot be made; the message says why and what to do."""


@dataclass
class Gathering:
    """Which wheels are needed, found by following what each one says it needs."""

    present: Mapping[str, str | None]
    """Packages on the machine; the version is None where only the name is known."""
    fetch: Fetch
    wheels: dict[str, str] = field(default_factory=dict)
    """Name → version of what was fetched."""

    def need(self, wanted: Requirement, because: str) -> None:
        """Fetch a package if it is missing, and then what it needs.

        Raises:
            KitError: it is never carried, or was fetched in a version that does not fit.
        """
        name = canonicalize_name(wanted.name)
        if name in self.wheels:
            if not wanted.specifier.contains(self.wheels[name], prereleases=True):
                raise KitError(
                    f"{because} needs {wanted}, and {name} {self.wheels[name]} was fetched for "
                    "another package. Name a version that suits both in pyproject.toml."
                )
            return
        there = self.present.get(name, "")
        fits = there is None or (there and wanted.specifier.contains(there, prereleases=True))
        if fits:
            return
        if NEVER.fullmatch(name):
            has = f"has {name} {there}" if there else f"lacks {name}"
            raise KitError(
                f"{because} needs {wanted}, and the machine {has}. It comes with the machine's "
                "CUDA: install it there, or choose another machine."
            )
        wheel = self.fetch(wanted)
        self.wheels[name], needs = wheel_metadata(wheel)
        for requirement in needs:
            self.need(requirement, f"{name} {self.wheels[name]}")


def wheel_metadata(wheel: Path) -> tuple[str, list[Requirement]]:
    """Return a wheel's version, and what it needs on the machine."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if re.fullmatch(r"[^/]*\.dist-info/METADATA", n)]
        found = Parser().parsestr(archive.read(name).decode())
    return found["Version"], list(_applying(found.get_all("Requires-Dist", [])))


def _applying(texts: list[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate(dict(_MARKERS)):
            yield requirement


def requirements(project: Path) -> list[Requirement]:
    """Return what samestep and its GPU tests need, from pyproject.toml."""
    document = tomllib.loads(project.read_text(encoding="utf-8"))
    table, groups = document["project"], document["dependency-groups"]
    extras = (table["optional-dependencies"][name] for name in EXTRAS)
    texts = [*table["dependencies"], *itertools.chain(*extras), *groups["bench"]]
    texts += [text for text in groups["dev"] if Requirement(text).name in TEST_TOOLS]
    return list(_applying(texts))


def present_packages(probe: Path | None) -> dict[str, str | None]:
    """Return the packages of the machine: those of a probe, else those that are usually there."""
    if probe is None:
        return dict.fromkeys(map(canonicalize_name, USUALLY_THERE.read_text().split()))
    try:
        found = json.loads(probe.read_text(encoding="utf-8"))
        python, packages = str(found["python"]), dict(found["packages"])
    except (OSError, ValueError, KeyError) as error:
        raise KitError(
            f"{probe} is no probe ({error!r}). Make one on the machine: "
            "python3 tools/gpu_probe.py > probe.json"
        ) from error
    if not python.startswith(f"{PYTHON}."):
        raise KitError(
            f"{probe}: the machine has Python {python}; the wheels are for {PYTHON}. Use a Python "
            f"{PYTHON} there."
        )
    return {canonicalize_name(name): version for name, version in packages.items()}


def download(folder: Path) -> Fetch:
    """Return what fetches wheels for the machine into a folder with pip."""

    def fetch(wanted: Requirement) -> Path:
        before = set(folder.glob("*.whl"))
        target = [f"--platform={name}" for name in _PLATFORMS]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"),
                *(*target, f"--dest={folder}", f"{wanted.name}{wanted.specifier}"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        fetched = set(folder.glob("*.whl")) - before
        if done.returncode or len(fetched) != 1:
            raise KitError(f"pip could not download {wanted}:\n{done.stderr.strip()}")
        return fetched.pop()

    return fetch


def copy_code(destination: Path) -> None:
    """Copy every file that git tracks, as it is in the working tree.

    Raises:
        KitError: this is no clone.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        raise KitError(f"{ROOT} is no git clone, so what belongs to the code is not known.")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, destination / name)


def copy_data(source: Path, destination: Path) -> list[str]:
    """Copy what there is of the known data files; return the names of those that are missing."""
    if not source.is_dir():
        raise KitError(f"DATA={source} is no folder.")
    destination.mkdir()
    for name in DATA_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, destination / name)
    return [name for name in DATA_FILES if not (destination / name).exists()]


def check_size(folder: Path, most: int = MOST_BYTES) -> int:
    """Return the bytes of a folder.

    Raises:
        KitError: they are too many; the largest files are named.
    """
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total >= most:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        names = "".join(f"\n  {_mib(sizes[p])}  {p.relative_to(folder)}" for p in largest)
        raise KitError(
            f"The kit is {_mib(total)}, and must stay below {_mib(most)}. The largest files:{names}"
        )
    return total


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def make_kit(folder: Path, probe: Path | None, data: Path | None) -> str:
    """Make the kit anew; return a line on what is in it."""
    present = present_packages(probe)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    gathering = Gathering(present, download(folder / "wheels"))
    for requirement in requirements(ROOT / "pyproject.toml"):
        gathering.need(requirement, "samestep")
    copy_code(folder / "code")
    missing = copy_data(data, folder / "data") if data else list(DATA_FILES)
    known = str(probe) if probe else "what is usually there"
    facts = {"python": PYTHON, "by": known, "wheels": gathering.wheels, "no_data": missing}
    (folder / "kit.json").write_text(json.dumps(facts, indent=1) + "\n")
    size = _mib(check_size(folder))
    wheels = ", ".join(f"{n} {v}" for n, v in sorted(gathering.wheels.items())) or "none"
    lacks = f"; without {', '.join(missing)}" if missing else ""
    return f"{folder}: {size}; by {known}, wheels: {wheels}{lacks}"


def main() -> int:
    """Make the kit that the command line asks for; return 2 where it cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", type=Path, help="what tools/gpu_probe.py printed there")
    parser.add_argument("--data", type=Path, help=f"folder with {', '.join(DATA_FILES)}")
    asked = parser.parse_args()
    try:
        print(make_kit(FOLDER, asked.probe, asked.data))
    except KitError as error:
        sys.stderr.write(f"gpu-kit: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
