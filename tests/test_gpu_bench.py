"""The GPU's benchmark, dry: tiny sizes on a CPU."""

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
