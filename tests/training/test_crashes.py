"""Nothing is lost, whatever kills the job: tried with real SIGKILLs, in training and in writing.

What is killed is resumed, also on another number of ranks, and must end where the uninterrupted
run ended. The draws are printed; SAMESTEP_TEST_SEED draws others, and SAMESTEP_TEST_KILLS more.
"""

import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests import tiny
from tests.faults import Fault
from tests.processes import TIMEOUT_S

SEED = int(os.environ.get("SAMESTEP_TEST_SEED", "20261121"))
KILLS = int(os.environ.get("SAMESTEP_TEST_KILLS", "4"))
SHARDS = ["before the shards", "within the shards", "after the shards"]
WRITING = [
    *("within the copy", "within the checkpoint: 12000", "after the checkpoint's sync"),
    *("before the checkpoint's name", "after the checkpoint's name", "within the index"),
    *("after the index's name", "within the record"),
]
"""What each can tear or leave half done; beside them lie those of MORE."""
MORE = [
    *("before the checkpoint", "within the checkpoint: 0", "before the checkpoint's sync"),
    *("before the index's sync", "before the index's name", "before the record"),
    "after the record",
]


@pytest.fixture
def recipe(tmp_path) -> Path:
    return tiny.write_recipe(tmp_path)


def a_fault(point: str, nth: int, rank: int = 0) -> Fault:
    name, _, num_bytes = point.partition(": ")
    return Fault(name, nth, num_bytes=int(num_bytes or 0), rank=rank)


def kill(recipe: Path, run: Path, fault: Fault, *flags: str, on: int = 1) -> None:
    """Train until a rank kills itself, then end the others as a scheduler ends a job."""
    words = ("--run-dir", str(run), *flags)
    ranks = tiny.start(recipe, *words, faults=(fault,), world_size=on, folder=run.parent)
    struck_one = ranks.processes[fault.rank or 0]
    struck_one.join(TIMEOUT_S)
    assert struck_one.exitcode == -signal.SIGKILL, ranks.output()
    ranks.kill()
    ranks.wait()


def assert_began_at(step: int, run: Path, before: int) -> None:
    """Check by the records after the first `before` that the run resumed at a step, unless at 0."""
    found = [r for r in tiny.all_records(run)[before:] if r["event"] == "resume"]
    assert [(r["step"], r["problems"]) for r in found] == ([(step, [])] if step else [])


def assert_resumes(run: Path, uninterrupted: Path, on: int) -> None:
    announced, before = tiny.newest_announced(run), tiny.num_records(run)
    tiny.resumed(run, on=on)
    assert_began_at(announced, run, before)
    assert tiny.newest_announced(run) == tiny.STEPS
    assert not list(run.rglob("*.tmp"))
    tiny.assert_same_training(run, uninterrupted)


def kill_again(recipe: Path, run: Path, fault: Fault, *flags: str, on: int) -> None:
    print(f"seed {SEED}: {fault} on {on} ranks")
    announced, before = (
        (tiny.newest_announced(run), tiny.num_records(run)) if run.exists() else (0, 0)
    )
    kill(recipe, run, fault, "--resume", *flags, on=on)
    assert_began_at(announced, run, before)
    assert tiny.newest_announced(run) >= announced


@pytest.mark.parametrize(
    "points", [WRITING, pytest.param(MORE, marks=pytest.mark.slow)], ids=["", "more"]
)
def test_kills_while_checkpoints_are_written_lose_none(uninterrupted, recipe, tmp_path, points):
    draw, run = random.Random(f"{SEED}-{points}"), tmp_path / "run"
    for number, point in enumerate(points):
        ranks = 2 if number % 4 == 1 else 1  # rank 0 alone writes
        kill_again(recipe, run, a_fault(point, draw.randint(1, 2)), on=ranks)
        if "within" in point or "sync" in point or "before the checkpoint's name" in point:
            torn = list((run / "checkpoints").glob(".*.tmp"))  # it struck where it should
            assert len(torn) == ("record" not in point and "copy" not in point)
    assert_resumes(run, uninterrupted, 1)


def test_kills_while_ranks_write_their_parts_lose_no_checkpoint(uninterrupted, recipe, tmp_path):
    draw, run = random.Random(f"{SEED}-shards"), tmp_path / "run"
    for number, point in enumerate(SHARDS):
        fault = a_fault(point, draw.randint(2, 3), rank=number % 2)
        kill_again(recipe, run, fault, "--strategy", "fsdp", on=2)
        assert all(entry["files"] for entry in tiny.read_index(run)["checkpoints"])
    assert_resumes(run, uninterrupted, 1)
    kept = {Path(entry["path"]).stem for entry in tiny.read_index(run)["checkpoints"]}
    assert {path.stem for path in (run / "checkpoints").glob("*.shards")} <= kept


@pytest.mark.parametrize("point", ["before a deletion", "after a deletion"])
def test_a_kill_while_an_old_one_is_deleted_leaves_the_rest(uninterrupted, recipe, tmp_path, point):
    nth = random.Random(f"{SEED}-{point}").randint(1, 8)
    print(f"seed {SEED}: {point} {nth}")
    run = tmp_path / "run"
    kill(recipe, run, Fault(point, nth), "--keep-top-k", "1")
    index = tiny.read_index(run)
    for name in ("last", "best"):
        assert index[name] is None or (run / "checkpoints" / index[name]["path"]).exists()
    newest = max(entry["step"] for entry in index["checkpoints"])
    tiny.resumed(run)
    (found,) = (r for r in tiny.all_records(run) if r["event"] == "resume")
    assert found["step"] == newest
    tiny.assert_same_training(run, uninterrupted)


def test_a_job_killed_at_random_moments_still_arrives(uninterrupted, recipe, tmp_path):
    draw = random.Random(SEED)
    run, world_size = tmp_path / "run", 2
    tiny.set_pace(recipe, 0.01)
    target, flags = recipe, ("--run-dir", str(run))
    for _ in range(2):
        more = draw.randint(5, 16)
        ranks = tiny.start(target, *flags, world_size=world_size, folder=tmp_path)
        wanted = tiny.num_records(run) + more
        tiny.until(lambda wanted=wanted: tiny.num_records(run) >= wanted, ranks)
        ranks.kill()
        assert ranks.wait() == [-signal.SIGKILL] * world_size
        print(f"seed {SEED}: killed at record {tiny.num_records(run)} at world size {world_size}")
        tiny.newest_announced(run)
        target, flags = run, ("--resume",)
        world_size = 3 - world_size
    tiny.set_pace(recipe, 0)
    assert_resumes(run, uninterrupted, world_size)


@pytest.mark.slow
def test_many_kills_in_a_row_at_random_points_still_arrive(uninterrupted, recipe, tmp_path):
    """At points of all kinds, with other settings for each run: what benchmarks/kills.py counts."""
    draw = random.Random(SEED)
    run, world_sizes = tmp_path / "run", itertools.cycle([1, 2])
    for number, world_size in enumerate(itertools.islice(world_sizes, KILLS), 1):
        if not run.exists():  # the run keeps these settings
            flags = draw.choice([(), (), ("--checkpoint-sync",), ("--strategy", "fsdp")])
        sharded = "fsdp" in flags and world_size > 1
        points = ["after a step", "before an evaluation", *WRITING, *MORE, *(SHARDS * sharded)]
        point = draw.choice(points)
        if point == "within the copy" and "--checkpoint-sync" in flags:
            point = "before the checkpoint"
        nth = {"after a step": draw.randint(1, 6), "before an evaluation": 1}.get(
            point, draw.randint(1, 2)
        )
        rank = draw.randrange(world_size) if point in SHARDS else 0
        how = " ".join(flags) or "defaults"
        print(f"kill {number}, {point}, visit {nth}, {how} at world size {world_size}")
        kill_again(recipe, run, a_fault(point, nth, rank), *flags, on=world_size)
        if number == KILLS or tiny.newest_announced(run) > tiny.STEPS - 20:
            assert_resumes(run, uninterrupted, next(world_sizes))
            shutil.rmtree(run)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_when_one_of_two_ranks_is_killed_the_other_ends(uninterrupted, recipe, tmp_path, killed):
    nth = random.Random(f"{SEED}-{killed}").randint(5, 60)
    print(f"seed {SEED}: rank {killed} after step {nth}")
    run, fault = tmp_path / "run", Fault("after a step", nth, rank=killed)
    ranks = tiny.start(
        recipe, "--run-dir", str(run), faults=(fault,), world_size=2, folder=tmp_path
    )
    ranks.processes[killed].join(TIMEOUT_S)
    began = time.monotonic()
    ranks.processes[1 - killed].join(TIMEOUT_S)
    took = time.monotonic() - began
    codes = ranks.wait()
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 1, ranks.output()
    assert took < 300  # Gloo by itself would wait for half an hour
    assert f"Rank {1 - killed} " in ranks.output()
    assert_resumes(run, uninterrupted, 1)


def test_a_kill_leaves_one_evaluation_and_a_torn_file_goes(uninterrupted, recipe, tmp_path):
    run = tmp_path / "run"
    tiny.struck(recipe, run, Fault("after a step", 11, signum=signal.SIGTERM))
    assert tiny.read_index(run)["last"]["path"] == "checkpoint_step_11.pt"
    kill(recipe, run, Fault("before the checkpoint"), "--resume")
    assert [r["event"] for r in tiny.all_records(run)][-2:] == ["epoch", "evaluation"]
    assert_resumes(run, uninterrupted, 1)
    run = tmp_path / "torn"
    tiny.trained(recipe, run, "--max-steps", "9")
    torn = run / "checkpoints" / ".checkpoint_step_10.pt.tmp"
    torn.write_bytes(b"PK")
    tiny.resumed(run, "--max-steps", "12", "--checkpoint-every-steps", "1000")
    assert not torn.exists()


@pytest.mark.parametrize("point", ["before the test's record", "after the test's record"])
def test_a_kill_at_the_very_end_leaves_one_evaluation(uninterrupted, recipe, tmp_path, point):
    kill(recipe, tmp_path / "run", Fault(point))
    assert_resumes(tmp_path / "run", uninterrupted, 1)
