"""A rank that hangs is named by rank and line, and nothing else is taken for a hang."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.base.startup import JOB_RUN
from samestep.cluster.slurm.rank_ends import first_end, read_failures
from samestep.cluster.slurm.script import START
from samestep.launch.ranks import watched
from samestep.launch.ranks.launch import Launch
from samestep.launch.ranks.watched import STALLED
from samestep.launch.ranks.watcher import HEARTBEAT, Node, record_mismatch
from samestep.launch.stall.pulse import Pulse, RankPulse
from tests.command_line import read_json, start, typed
from tests.processes import TIMEOUT_S, free_port, launch_environment
from tests.tiny import until

HANGS = """
import os, time
import torch
from torch import nn
from samestep import Recipe, Splits
RANK = os.environ.get("RANK")
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.steps = nn.Linear(4, 2), 0
    def forward(self, x):
        self.steps += self.training
        if not self.training and self.steps:
            time.sleep(EVALUATION_S)
        if self.training and self.steps == AT_STEP and RANK == "1":
            time.sleep(3600)  # hangs
        if self.training:
            time.sleep(PACE_S)
        return self.linear(x)
def data():
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long()
    return Splits(train=(x, y), validation=(x[:10], y[:10]))
recipe = Recipe(model=Model, data=data, settings={"epochs": 4, "batch_size": 10})
"""
# The other rank may see that this one is gone before it is killed itself.
KILLED_OR_LOST = (-signal.SIGKILL, 1)
HANG_LINE = HANGS.splitlines().index("            time.sleep(3600)  # hangs") + 1


def write_recipe(folder: Path, **values: float) -> Path:
    text = HANGS
    for name, value in ({"EVALUATION_S": 0, "AT_STEP": 0, "PACE_S": 0} | values).items():
        text = text.replace(name, str(value))
    (folder / "hangs.py").write_text(text)
    return folder / "hangs.py"


def train(folder: Path, stall_s: float, *flags: str, **values: float):
    recipe = write_recipe(folder, **values)
    words = ("train", str(recipe), "--run-dir", str(folder / "run"), "--stall-s", str(stall_s))
    return start(*words, *flags, world_size=2, folder=folder)


def test_a_rank_that_hangs_is_named_by_rank_and_line_and_all_ranks_are_ended(tmp_path):
    ranks = train(tmp_path, 1, AT_STEP=8)
    lost, hung = ranks.wait()
    assert hung == -signal.SIGKILL
    assert lost in KILLED_OR_LOST
    result = read_json(tmp_path / "run" / "result.json")
    assert result["status"] == "failed"
    assert (result["exit_code"], result["steps"]) == (STALLED, 7)
    stall = result["stall"]
    assert (stall["rank"], stall["line"]) == (1, HANG_LINE)
    assert stall["file"].endswith("hangs.py")
    assert "backward" in stall["waiting_in"]
    assert ranks.output().count(f"hangs.py:{HANG_LINE}") == 1, "said once"
    told = (tmp_path / "run" / "rank-1.stall").read_text()
    assert f"hangs.py:{HANG_LINE} in forward" in told


def test_long_evaluations_and_a_suspended_job_are_no_stall(tmp_path):
    ranks = train(tmp_path, 1.5, "--epochs", "2", EVALUATION_S=4, PACE_S=0.05)
    until((tmp_path / "run" / "events.jsonl").exists, ranks)
    for number, seconds in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 0.0)):
        for process in ranks.processes:
            os.kill(process.pid, number)
        time.sleep(seconds)
    assert ranks.wait() == [0, 0], ranks.output()


def test_0_watches_nothing(monkeypatch):
    monkeypatch.setattr(watched.subprocess, "Popen", None)  # what starts the watcher
    watched.start_watcher(Launch(world_size=2, local_world_size=2), stall_s=0)
    assert watched._own is None


def node(**more) -> Node:
    given = {"folder": Path(), "node": 0, "num_nodes": 1, "local_world_size": 2, "world_size": 2}
    return Node(**given | {"least_s": 60.0, "exact": False} | more)


@pytest.mark.parametrize(
    ("step_s", "times", "exact", "limit_s"),
    [
        (0.1, 1, False, 60),
        (10.0, 1, False, 200),
        (10.0, 10, False, 600),
        (100.0, 10, False, 2000),
        (10.0, 1, True, 60),
        (10.0, 30, True, 1800),
    ],
)
def test_what_a_rank_does_has_its_own_limit(step_s, times, exact, limit_s):
    pulse = RankPulse(rank=0, step_times=(step_s,) * 9, times=times)
    assert node(exact=exact).limit_s(pulse) == pytest.approx(limit_s)
    assert node(exact=exact).limit_s(replace(pulse, step_times=())) >= 60


def test_the_job_is_told_which_calls_of_its_ranks_did_not_meet(tmp_path, monkeypatch):
    (run := tmp_path / "run").mkdir()
    monkeypatch.setenv(JOB_RUN, str(run))
    pulses = [Pulse(tmp_path, rank) for rank in range(2)]
    for pulse, detail in zip(pulses, ("float32[4]", "float32[7]"), strict=True):
        with suppress(RuntimeError), pulse.inside("all_gather", detail, f"a.py:{pulse.rank}", ""):
            raise RuntimeError("Connection reset by peer")
        pulse.close()
    told = record_mismatch(tmp_path)
    ends = [f"srun: error: node1: task {rank}: Aborted" for rank in range(2)]
    assert first_end(ends, [failure for _, failure in read_failures(run)]).said == told
    assert "float32[4] of a.py:0" in told
    assert "float32[7] of a.py:1" in told


SCRIPT = """
import atexit, os, sys, time
sys.stdout.write(repr([sys.argv, __name__, sys.path[0], __file__, "torch" in sys.modules]))
atexit.register(lambda: print("at the end"))
how = sys.argv[1]
if how == "torch":
    import torch
    torch.distributed.init_process_group("gloo")
    for step in range(9):
        if step == 5 and os.environ["RANK"] == "1":
            time.sleep(3600)  # hangs
        torch.distributed.all_reduce(torch.ones(1))
def fails():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise ValueError("wrong") from error
if how == "fails":
    fails()
sys.exit({"code": 7, "text": "said"}.get(how))
"""


def ran(folder: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    done = typed("-B", *words, folder=folder, **variables)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", ["text", "fails"])
def test_a_script_of_a_job_runs_as_python_runs_it(tmp_path, how):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / ".start.py").write_text(START)
    expected = ran(tmp_path, "script.py", how, "a b")
    job = {"SAMESTEP_RUN_DIR": str(tmp_path / "job")}
    assert ran(tmp_path, "job/.start.py", "script.py", how, "a b", **job) == expected
    assert "Traceback" in expected[2] or how != "fails"


def test_where_samestep_is_not_installed_a_script_starts_all_the_same(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / ".start.py").write_text(START)
    # Python without site-packages, as in a container that has its own.
    bare = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1", "RANK": "0"}
    code, output, errors = ran(tmp_path, "-S", ".start.py", "script.py", "code", **bare)
    assert code == 7
    assert "'__main__'" in output
    assert errors.count("samestep:") == 1


def test_a_script_whose_rank_hangs_is_ended_and_the_rank_named(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / ".start.py").write_text(START)
    line = SCRIPT.splitlines().index("            time.sleep(3600)  # hangs") + 1
    port, processes = free_port(), []
    for rank in range(2):
        more = {"SAMESTEP_RUN_DIR": str(tmp_path), "SAMESTEP_STALL_S": "6"}
        variables = {**os.environ, **launch_environment(rank, 2, port), **more}
        words = [sys.executable, ".start.py", "script.py", "torch"]
        processes.append(
            subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)
        )
    try:
        lost, hung = (process.wait(TIMEOUT_S) for process in processes)
        assert hung == -signal.SIGKILL
        assert lost in KILLED_OR_LOST
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
    stall = read_json(tmp_path / "result.json")["stall"]
    assert (stall["rank"], stall["line"]) == (1, line)
    assert stall["waiting_in"].startswith("all_reduce #6 of ")
    failure = json.loads((tmp_path / ".failure-rank-1.json").read_text())
    assert (failure["code"], failure["stalled"]) == (STALLED, True)
    assert not (tmp_path / HEARTBEAT.format(node=0)).exists(), "nothing says that it still runs"
