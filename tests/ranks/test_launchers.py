"""The launchers as they are: torchrun, `samestep train --nproc`, and a script of one's own."""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.run.records import read_records
from tests.command_line import RECIPE, read_json
from tests.processes import TIMEOUT_S, start_ranks

SAMESTEP = [sys.executable, "-m", "samestep"]
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"),
]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # else torchrun warns that it sets it
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def on_two_ranks(launcher: str, words: list[str]) -> list[str]:
    if launcher == "torchrun":
        return [*TORCHRUN, "-m", "samestep", *words]
    return [*SAMESTEP, *words, "--nproc", "2"]


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("nproc", marks=pytest.mark.slow)])
def test_a_launcher_trains_on_two_ranks_and_rank_0_alone_prints(tmp_path, launcher):
    train = ["train", "spiral", "--epochs", "1", "--num-samples", "500", "--run-dir", "run"]
    done = run(on_two_ranks(launcher, train), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("2 ranks, cpu") == 1
    assert len(re.findall(r"^epoch 1 ", done.stdout, re.MULTILINE)) == 1
    result = read_json(tmp_path / "run" / "result.json")
    assert (result["status"], result["world_size"], result["backend"]) == ("completed", 2, "gloo")
    # From the user's command on, the ranks' own start included.
    assert result["seconds_to_first_step"] > 0.5
    assert (tmp_path / "run" / "rank-1.log").read_text() == ""


FAILS_ON_RANK_1 = RECIPE.replace(
    "recipe = Recipe(",
    """
import os
steps = 0

def loss(outputs, targets):
    global steps
    steps += 1
    if steps == 3 and os.environ.get("RANK") == "1":
        raise KeyError("lost on the way")
    return nn.functional.cross_entropy(outputs, targets)

recipe = Recipe(loss=loss, """,
)


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "nproc"])
def test_when_one_rank_fails_the_others_stop_soon_and_its_failure_is_shown_once(tmp_path, launcher):
    (tmp_path / "fails.py").write_text(FAILS_ON_RANK_1)
    line = 1 + FAILS_ON_RANK_1.splitlines().index('        raise KeyError("lost on the way")')
    train = ["train", "fails.py", "--epochs", "1000", "--run-dir", "run"]
    started = time.monotonic()
    done = run(on_two_ranks(launcher, train), tmp_path)
    assert time.monotonic() - started < 100  # Gloo by itself would wait for half an hour
    assert done.returncode == (2 if launcher == "nproc" else 1)
    told = re.findall(r"^samestep: .*", done.stderr, re.MULTILINE)
    assert len(told) == 1, done.stderr
    assert "[rank 1] " in told[0]
    assert "KeyError" in told[0]
    assert f"fails.py:{line}" in told[0]
    if launcher == "nproc":
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" in (tmp_path / "run" / "rank-1.log").read_text()


MISTAKE_OF_RANK_1 = "no data on this node"


def test_a_mistake_that_one_rank_alone_sees_names_the_rank(tmp_path):
    (tmp_path / "mine.py").write_text(
        RECIPE.replace(
            "def data():",
            "def data():\n"
            "    import os\n    from samestep import UserError\n"
            '    if os.environ["RANK"] == "1":\n'
            f'        raise UserError("{MISTAKE_OF_RANK_1}")',
        )
    )
    done = run([*SAMESTEP, "train", "mine.py", "--nproc", "2", "--run-dir", "run"], tmp_path)
    assert done.returncode == 2
    (told,) = done.stderr.splitlines()
    assert told.startswith("samestep: [rank 1] ")
    assert MISTAKE_OF_RANK_1 in told
    assert not (tmp_path / "run").exists()


# Slow enough to be struck, until the file is gone; it says which ranks take its first step.
PACED = RECIPE.replace(
    "recipe = Recipe(",
    """
import time
from pathlib import Path

PACE = Path(__file__).with_name("pace")

def loss(outputs, targets):
    if PACE.exists() and outputs.requires_grad:
        time.sleep(2)  # 60 steps outlast the start of another node on a busy machine
    return nn.functional.cross_entropy(outputs, targets)

recipe = Recipe(loss=loss, """,
)
GOES_ON = (
    *("-m", "samestep", "train", "paced.py", "--run-dir", "run", "--resume", "--epochs", "20"),
    *("--batch-size", "20", "--checkpoint-every-steps", "1", "--log-every", "1"),
)


def starts(folder: Path) -> list[dict[str, Any]]:
    """Return the `start` records of a run that may not have begun."""
    path = folder / "run" / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["event"] == "start"]


def wait_for_step(folder: Path, *, after_starts: int) -> None:
    """Wait until a training has been started so often, and has then taken two steps."""
    path, deadline = folder / "run" / "events.jsonl", time.monotonic() + TIMEOUT_S

    def steps() -> int:
        if len(starts(folder)) < after_starts:
            return 0
        return path.read_text().rpartition('"event": "start"')[2].count('"event": "step"')

    while steps() < 2:
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)  # another process's file changes without an event to await


def children(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the process ids of the ranks that an agent has started."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def steps_of(run: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_records(run) if r["event"] == "step"]


def assert_uninterrupted(folder: Path) -> None:
    """Check that the run in a folder took the steps of one process that nobody disturbed."""
    done = run([sys.executable, *GOES_ON, "--run-dir", "alone"], folder)
    assert done.returncode == 0, done.stderr
    assert read_json(folder / "run" / "result.json")["status"] == "completed"
    ours, alone = steps_of(folder / "run"), steps_of(folder / "alone")
    assert [step for step, _ in ours] == list(range(1, 61))
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in alone], rel=1e-5)


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_meet_and_go_on(tmp_path):
    (tmp_path / "paced.py").write_text(PACED)
    (tmp_path / "pace").touch()
    command = [*TORCHRUN, "--max-restarts=1", *GOES_ON]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as agent:
        try:
            wait_for_step(tmp_path, after_starts=1)
            os.kill(children(agent)[1], signal.SIGKILL)
            wait_for_step(tmp_path, after_starts=2)
            (tmp_path / "pace").unlink()
            assert agent.wait(TIMEOUT_S) == 0
        finally:
            agent.terminate()
    assert [start["world_size"] for start in starts(tmp_path)] == [2, 2]
    assert_uninterrupted(tmp_path)


def agent(folder: Path, port: int, *, is_host: bool) -> subprocess.Popen[bytes]:
    """Start torchrun's agent of one of one or two nodes, with one rank."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint=localhost:{port}"),
        *("--local-addr=127.0.0.1", "--max-restarts=3", "--rdzv-conf"),
        f"is_host={int(is_host)},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
        *GOES_ON,
    ]
    # Without it both agents of PyTorch 2.13 fail after a minute when one comes later.
    more = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **more})


@pytest.mark.slow
def test_a_node_that_comes_or_is_lost_under_torchrun_leaves_the_training_what_it_is(tmp_path):
    (tmp_path / "paced.py").write_text(PACED)
    (tmp_path / "pace").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [agent(tmp_path, port, is_host=True)]
    try:
        wait_for_step(tmp_path, after_starts=1)
        agents.append(agent(tmp_path, port, is_host=False))
        wait_for_step(tmp_path, after_starts=2)
        for pid in (agents[1].pid, *children(agents[1])):  # the agent first: it would tell
            os.kill(pid, signal.SIGKILL)
        wait_for_step(tmp_path, after_starts=3)
        (tmp_path / "pace").unlink()
        assert agents[0].wait(TIMEOUT_S) == 0
    finally:
        for one in agents:
            one.terminate()
            one.wait(TIMEOUT_S)
    assert [start["world_size"] for start in starts(tmp_path)] == [1, 2, 1]
    assert_uninterrupted(tmp_path)


SCRIPT = """
import json, os
from pathlib import Path
import torch
import samestep

place = samestep.dist.setup_distributed(device="cpu")
rank, local_rank, world_size = place
mine = torch.tensor([float(rank), 1.0])
found = {
    "place": place,
    "main": samestep.dist.is_main_process(),
    "sum": samestep.dist.reduce_tensor(mine, "sum").tolist(),
    "mean": samestep.dist.reduce_tensor(mine, "mean").tolist(),
    "max": samestep.dist.reduce_tensor(mine, "max").tolist(),
    "input": mine.tolist(),
}
if rank == 0:
    Path("made-by-rank-0").touch()
samestep.dist.barrier()
found["seen"] = Path("made-by-rank-0").exists()
samestep.dist.cleanup()
found["left"] = not torch.distributed.is_initialized()
found["after"] = samestep.dist.reduce_tensor(mine, "sum").tolist()
samestep.dist.cleanup()  # once more does nothing
Path(f"found-{rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow  # the examples of a loop of one's own start so, too
def test_a_script_of_ones_own_meets_the_other_ranks_under_torchrun(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = run([*TORCHRUN, "mine.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert json.loads((tmp_path / f"found-{rank}.json").read_text()) == {
            "place": [rank, rank, 2],
            "main": rank == 0,
            "sum": [1.0, 2.0],
            "mean": [0.5, 1.0],
            "max": [1.0, 1.0],
            "input": [float(rank), 1.0],
            "seen": True,
            "left": True,
            "after": [float(rank), 1.0],
        }


def test_the_same_script_runs_alone(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    ranks = start_ranks(_execute, 1, tmp_path / "output", tmp_path)
    assert ranks.wait() == [0], ranks.output()
    found = json.loads((tmp_path / "found-0.json").read_text())
    assert found["place"] == [0, 0, 1]
    assert found["main"]
    assert found["sum"] == found["mean"] == found["max"] == [0.0, 1.0]


def _execute(folder: Path) -> None:
    os.chdir(folder)
    runpy.run_path("mine.py", run_name="__main__")


def test_before_setup_a_process_is_alone():
    assert samestep.dist.is_main_process()
    assert samestep.dist.reduce_tensor(torch.tensor([2.0]), "mean").tolist() == [2.0]
    samestep.dist.barrier()
    samestep.dist.cleanup()
