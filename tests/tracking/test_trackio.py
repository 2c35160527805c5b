"""Trackio's own client: a training that was killed and resumed is one run, with each value once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import tiny
from tests.faults import Fault
from tests.tracking import readers

pytest.importorskip("trackio", reason="not installed: pip install 'samestep[trackio]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
READ = """import json
from trackio.sqlite_storage import SQLiteStorage as store
(run,) = store.get_runs("tiny")
print(json.dumps([run, store.get_logs("tiny", run)]))
"""


def test_a_killed_and_resumed_training_is_one_run_of_trackio_with_each_value_once(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path, tiny.RECIPE), tmp_path / "run"
    flags = ("--epochs", "3", "--log-every", "1", "--track", "trackio", "--track-name", "mine")
    tiny.struck(recipe, run, Fault("after a step", nth=14, signum=signal.SIGKILL), *flags)
    tiny.resumed(run)
    where = {"TRACKIO_DIR": str(run / "tracking" / "trackio")}
    told = subprocess.check_output([sys.executable, "-c", READ], env=os.environ | where)
    name, rows = json.loads(told.splitlines()[-1])
    assert name.startswith("mine-")
    lines = [row["line"] for row in rows if "line" in row]
    assert len({*lines}) == len(lines)
    for series in ("train", "epoch", "validation", "test"):
        loss = f"{series}/loss"  # times differ where a killed attempt had sent the step before
        expected = [(step, values[loss]) for step, _, values in readers.expected(run)[series]]
        assert sorted((row["step"], row[loss]) for row in rows if loss in row) == expected
    assert rows[-1]["result/status"] == "completed"
