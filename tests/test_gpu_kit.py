"""The kit for a machine with a GPU: what it gathers, what it unpacks, and its commands, run dry."""

import gzip
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
from tools import gpu_kit

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


def test_what_samestep_and_the_gpu_tests_need_is_asked_for_beside_the_code_of_git(tmp_path):
    names = {r.name for r in gpu_kit.requirements(ROOT / "pyproject.toml")}
    assert names >= {"torch", "msgspec", "lightning", "accelerate", "pytest-timeout"}
    assert not names & {"mypy", "ruff", "mlflow"}
    gpu_kit.copy_code(tmp_path)
    assert (tmp_path / "tools" / "gpu.sh").read_bytes() == (ROOT / "tools/gpu.sh").read_bytes()
    assert not (tmp_path / ".git").exists()
    assert not list(tmp_path.rglob("__pycache__"))


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


@pytest.mark.slow
def test_the_check_runs_dry(tmp_path):
    """Each test of tests/gpu is in the record, and what is not run on the CPU says why."""
    command, own = ["bash", ROOT / "tools" / "gpu.sh", "check", "--dry"], {"PYTHON": sys.executable}
    environment = {**os.environ, **own, "OUT": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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
