"""The kit for a machine with a GPU: what it gathers, what it unpacks, and its commands, run dry."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from samestep.core.recipes.mnist import read_images_and_labels
from tests.command_line import read_json
from tools import gpu_kit, gpu_report

ROOT = Path(__file__).parent.parent


def write_wheel(folder, name, version, needs=()):
    """Write a wheel with one module of its name."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    about = f"{name}-{version}.dist-info"
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{about}/METADATA", "\n".join([*lines, "", "Some words"]))
        archive.writestr(f"{about}/WHEEL", tag)
        archive.writestr(f"{about}/RECORD", "")
    return path


def gather(present, wheels, folder, *wanted):
    """Follow what made wheels need; return the versions of those that were fetched."""

    def fetch(requirement):
        return write_wheel(folder, requirement.name, *wheels[requirement.name])

    gathering = gpu_kit.Gathering(present, fetch)
    for requirement in wanted:
        gathering.need(Requirement(requirement), "samestep")
    return gathering.wheels


def test_what_is_missing_is_fetched_with_all_that_it_needs_itself(tmp_path):
    needs = ['there>=1; python_version >= "3.12"', "deeper", 'old; python_version < "3.12"']
    wheels = {"front": ("2.0", [*needs, 'windows; sys_platform == "win32"', 'x; extra == "all"'])}
    wheels |= {"deeper": ("0.1", ["front>=2"])}
    assert gather({"there": "1.5"}, wheels, tmp_path, "front", "there") == {
        "front": "2.0",
        "deeper": "0.1",
    }


def test_a_package_that_is_too_old_is_fetched_and_versions_that_exclude_each_other_not(tmp_path):
    assert gather({"one": "1.0"}, {"one": ("1.2", [])}, tmp_path, "one>=1.1") == {"one": "1.2"}
    assert gather({"one": None}, {}, tmp_path, "one>=1.1") == {}  # which version is not known
    wheels = {"one": ("1.0", ["both>=2"]), "both": ("1.5", [])}
    with pytest.raises(gpu_kit.KitError):
        gather({}, wheels, tmp_path, "both<2", "one")


def test_what_samestep_and_the_gpu_tests_need_is_asked_for_beside_the_code_of_git(tmp_path):
    names = {r.name for r in gpu_kit.requirements(ROOT / "pyproject.toml")}
    assert names >= {"torch", "msgspec", "lightning", "accelerate", "pytest-timeout"}
    assert not names & {"mypy", "ruff", "mlflow"}
    gpu_kit.copy_code(tmp_path)
    assert (tmp_path / "tools" / "gpu.sh").read_bytes() == (ROOT / "tools/gpu.sh").read_bytes()
    assert not (tmp_path / ".git").exists()
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_test_that_was_cut_off_is_told_beside_those_that_ended(tmp_path):
    class Report(io.StringIO):
        longrepr, longreprtext, failed, skipped = None, "", False, False

        def __init__(self, nodeid, when, outcome):
            super().__init__()
            self.nodeid, self.when, self.outcome, self.duration = nodeid, when, outcome, 0.25
            self.failed, self.skipped = outcome == "failed", outcome == "skipped"

    notes = gpu_report.Notes(tmp_path / "notes")
    for name, call in (("good", "passed"), ("bad", "failed"), ("slow", None)):
        notes.pytest_runtest_logstart(name)
        for when in ("setup", "call", "teardown") if call else ("setup",):
            report = Report(name, when, call if when == "call" else "passed")
            report.longreprtext = "E   AssertionError: 1\nE   more" if report.failed else ""
            notes.pytest_runtest_logreport(report)
    rows = gpu_report.read_notes(tmp_path / "notes")
    assert [row["outcome"] for row in rows] == ["passed", "failed", gpu_report.NOT_ENDED]
    assert rows[0]["seconds"] == 0.75
    assert rows[1]["message"] == "AssertionError: 1"


@pytest.mark.slow
def test_what_is_started_finds_the_kits_packages_and_data(tmp_path):
    """As on the machine: the kit lies beside its code, and nothing but it is installed."""
    code, wheels = tmp_path / "code", tmp_path / "wheels"
    shutil.copytree(ROOT / "tools", code / "tools")
    wheels.mkdir()
    write_wheel(wheels, "brought", "1.5")
    (tmp_path / "data").mkdir()
    for kind, shape in (("images-idx3", (10, 2, 2)), ("labels-idx1", (10,))):
        header = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
        content = gzip.compress(header + bytes(int(np.prod(shape))))
        (tmp_path / "data" / f"t10k-{kind}-ubyte.gz").write_bytes(content)
    (tmp_path / "kit.json").write_text("{}")
    ask = "import gpu, json; print(json.dumps(gpu.make_environment(dry=False)))"
    for _ in range(2):  # the second finds it done
        done = subprocess.run(
            [sys.executable, "-c", ask], cwd=code / "tools", capture_output=True, check=True
        )
        environment = json.loads(done.stdout.splitlines()[-1])
        ask_again = "import brought; print(brought.version)"
        brought = subprocess.check_output([sys.executable, "-c", ask_again], env=environment)
        assert brought.strip() == b"1.5"
        images, _ = read_images_and_labels(Path(environment["SAMESTEP_GPU_DATA"], "mnist"), "test")
        assert images.shape == (1, 2, 2)


def gpu_sh(*arguments, root=ROOT, **variables):
    """Run tools/gpu.sh with this Python."""
    variables = {name: str(value) for name, value in variables.items()}
    return subprocess.run(
        ["bash", root / "tools" / "gpu.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [("check",), ("check", "part", "--dry")])
def test_what_cannot_be_done_here_is_refused(wrong, tmp_path):
    done = gpu_sh(*wrong, OUT=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_check_runs_dry(tmp_path):
    """Each test of tests/gpu is in the record, and what is not run on the CPU says why."""
    done = gpu_sh("check", "--dry", OUT=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_json(tmp_path / "check.json")
    rows = record["tests"]
    outcomes = {row["test"]: row["outcome"] for row in rows}
    assert record["dry"]
    assert not record["cut_off"]
    assert set(outcomes.values()) == {"passed", "skipped"}
    assert all(row["message"] for row in rows if row["outcome"] == "skipped")
    files = {name.partition("::")[0] for name in outcomes}
    assert files == {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    lines = (tmp_path / "check.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| test_")]) == len(rows)
    assert {path.name for path in tmp_path.iterdir()} == {"check.json", "check.md"}


@pytest.mark.slow
def test_a_failure_is_told_and_is_the_exit_code_of_the_check_and_of_the_bench(tmp_path):
    """A test, or a part, of another machine's copy of the kit fails."""
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "tools", root / "tools")
    (root / "tests" / "gpu").mkdir(parents=True)
    text = "import pytest\n@pytest.mark.gpu\ndef test_of_it():\n    assert 1 == 2, 'wrong'\n"
    for content, told in ((text, "wrong"), ("import no_such_module\n", "no_such_module")):
        (root / "tests" / "gpu" / "test_one.py").write_text(content)
        done = gpu_sh("check", "--dry", root=root, OUT=tmp_path / "out")
        assert done.returncode == 1
        (row,) = read_json(tmp_path / "out" / "check.json")["tests"]
        assert row["outcome"] == "failed"
        assert told in row["message"]
    (root / "benchmarks").mkdir()
    program = "import json, os, sys\nfrom pathlib import Path\n"
    program += "said = [sys.argv[1:], os.environ['SAMESTEP_GPU_DRY']]\n"
    program += "Path(sys.argv[-1], 'said.json').write_text(json.dumps(said))\nsys.exit(1)\n"
    (root / "benchmarks" / "gpu.py").write_text(program)
    done = gpu_sh("bench", "start-up", "--dry", root=root, OUT=tmp_path)
    assert done.returncode == 1
    said = [["start-up", "--dry", "--out", str(tmp_path)], "1"]
    assert read_json(tmp_path / "said.json") == said
