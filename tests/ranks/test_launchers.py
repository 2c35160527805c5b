"""The launchers as they are: torchrun, `samestep train --nproc`, and a script of one's own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from tests.command_line import RECIPE, read_json, typed
from tests.processes import TIMEOUT_S, free_port, run_ranks
from tests.tiny import all_records, events, num_records, start, trained, until

TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"),
]


def run(command: list[str], folder: Path, threads: int = 1) -> subprocess.CompletedProcess[str]:
    # Without the variable torchrun warns that it sets it.
    return typed(*command, folder=folder, OMP_NUM_THREADS=str(threads))


def test_torchrun_trains_on_two_ranks_and_rank_0_alone_prints(tmp_path):
    train = ["train", "spiral", "--epochs", "1", "--num-samples", "500", "--run-dir", "run"]
    train.append("--no-pictures")
    done = run([*TORCHRUN, "-m", "samestep", *train], tmp_path)
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
    if steps == 12 and os.environ.get("RANK") == "1":
        raise KeyError("lost on the way")
    return nn.functional.cross_entropy(outputs, targets)
recipe = Recipe(loss=loss, """,
)


@pytest.mark.slow
def test_when_one_rank_fails_the_others_stop_soon_and_its_failure_is_shown_once(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS_ON_RANK_1)
    line = 1 + FAILS_ON_RANK_1.splitlines().index('        raise KeyError("lost on the way")')
    train = ["train", "fails.py", "--epochs", "1000", "--run-dir", "run", "--nproc", "2"]
    started = time.monotonic()
    done = run([sys.executable, "-m", "samestep", *train], tmp_path, threads=2)
    assert time.monotonic() - started < 300  # Gloo by itself would wait for half an hour
    assert done.returncode == 2
    (told,) = done.stderr.splitlines()
    assert told.startswith("samestep: [rank 1] ")
    assert "KeyError" in told
    assert f"fails.py:{line}" in told
    assert "Traceback" in (tmp_path / "run" / "rank-1.log").read_text()
    environment = read_json(tmp_path / "run" / "environment.json")
    assert environment["threads"] == 2, "the user's number"
    # What the run keeps is what was shown, not that rank 0 has lost the other.
    reason = told.replace("samestep: ", "failed: ")
    *_, stop = all_records(tmp_path / "run")
    assert read_json(tmp_path / "run" / "result.json")["reason"] == stop["reason"] == reason


def test_under_other_launchers_a_run_keeps_the_first_failure_and_not_what_followed(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS_ON_RANK_1)
    run = tmp_path / "run"
    ranks = start(tmp_path / "fails.py", "--run-dir", str(run), world_size=2, folder=tmp_path)
    assert ranks.wait() == [1, 2]
    reason = read_json(run / "result.json")["reason"]
    assert "[rank 1]" in reason
    assert "KeyError" in reason
    assert all_records(run)[-1]["reason"] == reason


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
FLAGS = (
    *("--epochs", "20", "--batch-size", "20"),
    *("--checkpoint-every-steps", "1", "--log-every", "1"),
)
GOES_ON = ("-m", "samestep", "train", "paced.py", "--run-dir", "run", "--resume", *FLAGS)


def starts(folder: Path) -> list[dict[str, Any]]:
    """Return the `start` records of a run that may not have begun."""
    records = all_records(folder / "run") if num_records(folder / "run") else []
    return [record for record in records if record["event"] == "start"]


def wait_for_step(folder: Path, *, after_starts: int) -> None:
    """Wait until a training has been started so often, and has then taken two steps."""

    def has_taken() -> bool:
        names = [r["event"] for r in all_records(folder / "run")] if starts(folder) else []
        begun = [n for n, name in enumerate(names) if name == "start"]
        return len(begun) >= after_starts and names[begun[-1] :].count("step") >= 2

    until(has_taken)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


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
    port = free_port()
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
    assert read_json(tmp_path / "run" / "result.json")["status"] == "completed"
    trained(tmp_path / "paced.py", tmp_path / "alone", *FLAGS)
    ours, alone = (events(tmp_path / name, "step") for name in ("run", "alone"))
    assert [record["step"] for record in ours] == list(range(1, 61))
    losses = [record["loss"] for record in alone]
    assert [record["loss"] for record in ours] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_ranks_whose_torchrun_is_killed_save_and_end(tmp_path):
    (tmp_path / "paced.py").write_text(PACED)
    (tmp_path / "pace").touch()
    torchrun = agent(tmp_path, free_port(), is_host=True)
    wait_for_step(tmp_path, after_starts=1)
    torchrun.kill()
    torchrun.wait()
    until((tmp_path / "run" / "result.json").exists)
    assert read_json(tmp_path / "run" / "result.json")["reason"] == "SIGTERM"


def own_loop(folder: Path) -> dict[str, Any]:
    """Do what a script of the user's does with `samestep.dist`; return what it found."""
    rank, _, world_size = place = samestep.dist.setup_distributed(device="cpu")
    mine = torch.tensor([float(rank), 1.0])
    found = {
        "place": place,
        "main": samestep.dist.is_main_process(),
        **{op: samestep.dist.reduce_tensor(mine, op).tolist() for op in ("sum", "mean", "max")},
        "input": mine.tolist(),
    }
    if rank == 0:
        (folder / f"made-by-rank-0-of-{world_size}").touch()
    samestep.dist.barrier()
    found["seen"] = (folder / f"made-by-rank-0-of-{world_size}").exists()
    samestep.dist.cleanup()
    found["left"] = not torch.distributed.is_initialized()
    found["after"] = samestep.dist.reduce_tensor(mine, "sum").tolist()
    samestep.dist.cleanup()  # once more does nothing
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_script_of_ones_own_runs_alone_and_meets_the_other_ranks(tmp_path, world_size):
    ranks = run_ranks(own_loop, 2, tmp_path, tmp_path) if world_size == 2 else [own_loop(tmp_path)]
    for rank, found in enumerate(ranks):
        assert found == {
            "place": (rank, rank, world_size),
            "main": rank == 0,
            "sum": [float(sum(range(world_size))), float(world_size)],
            "mean": [sum(range(world_size)) / world_size, 1.0],
            "max": [world_size - 1.0, 1.0],
            "input": [float(rank), 1.0],
            "seen": True,
            "left": True,
            "after": [float(rank), 1.0],
        }
