"""The GPU's benchmark, dry: tiny sizes on a CPU. Its page is made from numbers written here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"


def bench(*words, **variables) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, words)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def measured(tmp_path) -> Path:
    """Files as a GPU would leave them, with numbers of our own."""

    def record(part, tables, profiles=None):
        about = {"part": part, "dry": False, "command": f"python benchmarks/gpu.py {part}"}
        about |= {"machine": {"device": "a made-up GPU", "torch": "0"}, "seconds": 1.0}
        about |= {"data": {"cifar10": "real"}}
        return about | {"tables": tables, "profiles": profiles or {}}

    def epochs(*values, **more):
        return [{"value": value, "first_epoch_s": 2.5, **more} for value in values]

    graph = "hand-written CUDA graph of 8 steps"
    spiral = {
        "plain PyTorch, DataLoader": epochs(100, 110),
        graph: epochs(1000, 1000, 1),  # time ran out within the third round
        "samestep, compile on": epochs(850, 860, compile_s=12.0),
    }
    seeds = {
        f"seed {seed}": [{"value": value, "accuracy": accuracy, "compile_s": 30.0, "wall_s": 99.0}]
        for seed, value, accuracy in ((42, 41.0, 0.945), (43, 59.0, 0.9412), (44, 42.0, 0.9399))
    }
    idle = {"value": 0.01, "gpu_idle": 0.03, "kind": "compute-bound", "share": 0.9}
    idle |= {"why": "It computes.", "change": "Nothing."}
    eager, on = {"ResNet-18, eager": idle}, {"ResNet-18, compile on": {**idle, "gpu_idle": 0.2}}
    failed = {"samestep": "exit code 1: oh | no"}
    folder = tmp_path / "measured"
    folder.mkdir()
    for one in (
        record("spiral", {"spiral": {"rounds": spiral, "failed": {}}}),
        record("resnet", {"resnet": {"rounds": {}, "failed": failed}}, eager),
        record("resnet-compiled", {"resnet-compiled": {"rounds": {}, "failed": {}}}, on),
        record("time-to-94", {"time-to-94": {"rounds": seeds, "failed": {}}}),
    ):
        (folder / f"{one['part']}.json").write_text(json.dumps(one))
    return folder


def test_the_page_says_which_targets_were_reached(measured, tmp_path):
    assert bench("page", measured, "--out", tmp_path).returncode == 0
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    targets = [line for line in lines if line.startswith("- Target:")]
    verdicts = {line.split(":")[1].strip(): "NOT REACHED" not in line for line in targets}
    assert verdicts["samestep, compile on ≥ 8 x plain PyTorch, DataLoader"]  # 8.5 and 7.8
    assert not verdicts["samestep, compile on ≥ 0.9 x hand-written CUDA graph of 8 steps"]
    assert verdicts["ResNet-18, eager, GPU idle ≤ 5%"]
    assert not verdicts["ResNet-18, compile on, GPU idle ≤ 5%"]
    assert not verdicts["all 3 in at most 10 s"], "one seed ended below 94 %"
    assert any("2 of 3 measured seeds" in line for line in lines)
    row, of_resnet = [line for line in lines if line.startswith("| samestep, compile on")]
    assert "not measured" in of_resnet
    assert [cell.strip() for cell in row.split("|")[-3:-1]] == ["2.50", "12.0"]
    assert not any("oh | no" in line for line in lines), "it would be a cell of its own"
    assert any("a made-up GPU" in line for line in lines)


@pytest.mark.slow
def test_all_parts_run_dry_and_the_page_shows_their_rows(tmp_path):
    before, out = files(RESULTS), tmp_path / "out"
    done = bench("all", "--dry", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {path.stem: json.loads(path.read_text()) for path in out.iterdir()}
    assert set(parts) == {
        *("spiral", "mnist", "resnet", "resnet-compiled", "time-to-94", "startup"),
        *("bits", "determinism", "async-checkpoint"),
    }
    for name, record in parts.items():
        assert (record["part"], record["dry"], record["machine"]["device"]) == (name, True, "cpu")
        for table in record["tables"].values():
            assert all("is not installed" in why for why in table["failed"].values())
            assert table["rounds"]
            assert all(one["value"] > 0 for rows in table["rounds"].values() for one in rows)
        assert not any("failed" in found for found in record["profiles"].values())
    assert bench("page", out).returncode == 2, "no page of dry numbers in results/"
    assert bench("page", out, "--out", tmp_path).returncode == 0
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"| {name} |" in page for name in parts["startup"]["tables"]["startup"]["rounds"])
    assert files(RESULTS) == before
