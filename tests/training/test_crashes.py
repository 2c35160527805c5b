"""Nothing is lost, whatever kills the job: tried with real SIGKILLs, in training and in writing.

Each is followed by a resume on another number of ranks, which must end where the uninterrupted
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

from tests.faults import POINTS, Fault
from tests.processes import TIMEOUT_S
from tests.tiny import (
    STEPS,
    all_records,
    assert_same_training,
    newest_announced,
    num_records,
    read_index,
    resumed,
    set_pace,
    start,
    struck,
    trained,
    until,
    write_recipe,
)

SEED = int(os.environ.get("SAMESTEP_TEST_SEED", "20261121"))
KILLS = int(os.environ.get("SAMESTEP_TEST_KILLS", "4"))
SHARDS = ["before the shards", "within the shards", "after the shards"]
WRITING = [
    "within the copy",
    "before the checkpoint",
    *(f"within the checkpoint: {num_bytes}" for num_bytes in (0, 12_000)),
    "before the checkpoint's sync",
    "after the checkpoint's sync",
    "before the checkpoint's name",
    "after the checkpoint's name",
    "within the index",
    "before the index's sync",
    "before the index's name",
    "after the index's name",
    "before the record",
    "within the record",
    "after the record",
]


@pytest.fixture
def recipe(tmp_path) -> Path:
    return write_recipe(tmp_path)


def a_fault(point: str, nth: int, rank: int = 0) -> Fault:
    name, _, num_bytes = point.partition(": ")
    return Fault(name, nth, num_bytes=int(num_bytes or 0), rank=rank)


def kill(recipe: Path, run: Path, fault: Fault, *flags: str, on: int = 1) -> None:
    """Train until a rank kills itself, then end the others as a scheduler ends a job."""
    words = ("--run-dir", str(run), *flags)
    ranks = start(recipe, *words, faults=(fault,), world_size=on, folder=run.parent)
    struck_one = ranks.processes[fault.rank or 0]
    struck_one.join(TIMEOUT_S)
    assert struck_one.exitcode == -signal.SIGKILL, ranks.output()
    ranks.kill()
    ranks.wait()


def assert_resumes(run: Path, uninterrupted: Path, on: int) -> None:
    """Go on from the newest announced checkpoint to the end of the uninterrupted run."""
    announced = newest_announced(run)
    before = num_records(run)
    resumed(run, on=on)
    found = [r for r in all_records(run)[before:] if r["event"] == "resume"]
    assert [(r["step"], r["problems"]) for r in found] == ([(announced, [])] if announced else [])
    assert newest_announced(run) == STEPS
    assert not list(run.rglob("*.tmp"))
    assert_same_training(run, uninterrupted)


@pytest.mark.parametrize(("place", "point"), [*enumerate(WRITING)], ids=WRITING)
def test_a_kill_while_a_checkpoint_is_written_loses_none_that_was_announced(
    uninterrupted, recipe, tmp_path, place, point
):
    draw = random.Random(f"{SEED}-{point}")
    ranks = 2 if place % 4 == 1 else 1  # rank 0 alone writes
    fault = a_fault(point, draw.randint(1, 12))
    print(f"seed {SEED}: {fault} on {ranks} ranks")
    run = tmp_path / "run"
    kill(recipe, run, fault, on=ranks)
    if "within" in point or "sync" in point or "before the checkpoint's name" in point:
        torn = list((run / "checkpoints").glob(".*.tmp"))
        assert len(torn) == (
            "record" not in point and "copy" not in point
        )  # it struck where it should
    assert_resumes(run, uninterrupted, 2 if place % 4 == 0 else 1)


@pytest.mark.parametrize(("point", "rank"), [*((p, n % 2) for n, p in enumerate(SHARDS))])
def test_a_kill_while_ranks_write_their_parts_loses_no_checkpoint_that_was_announced(
    uninterrupted, recipe, tmp_path, point, rank
):
    nth = random.Random(f"{SEED}-{point}").randint(1, 8)
    print(f"seed {SEED}: {point} {nth} on rank {rank}")
    run = tmp_path / "run"
    kill(recipe, run, a_fault(point, nth, rank), "--strategy", "fsdp", on=2)
    announced = read_index(run)["checkpoints"] if nth > 1 else []
    assert len(announced) == nth - 1
    assert all(entry["files"] for entry in announced)
    assert_resumes(run, uninterrupted, 2)
    kept = {Path(entry["path"]).stem for entry in read_index(run)["checkpoints"]}
    assert {path.stem for path in (run / "checkpoints").glob("*.shards")} <= kept


@pytest.mark.parametrize("point", ["before a deletion", "after a deletion"])
def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_those_that_are_kept(
    uninterrupted, recipe, tmp_path, point
):
    nth = random.Random(f"{SEED}-{point}").randint(1, 8)
    print(f"seed {SEED}: {point} {nth}")
    run = tmp_path / "run"
    kill(recipe, run, Fault(point, nth), "--keep-top-k", "1")
    index = read_index(run)
    for name in ("last", "best"):
        assert index[name] is None or (run / "checkpoints" / index[name]["path"]).exists()
    newest = max(entry["step"] for entry in index["checkpoints"])
    resumed(run)
    (found,) = (r for r in all_records(run) if r["event"] == "resume")
    assert found["step"] == newest
    assert_same_training(run, uninterrupted)


def test_a_job_killed_at_random_moments_again_and_again_still_arrives(
    uninterrupted, recipe, tmp_path
):
    """The kill comes from outside, whatever the ranks are doing just then."""
    draw = random.Random(SEED)
    run, world_size = tmp_path / "run", 2
    set_pace(recipe, 0.01)
    target, flags = recipe, ("--run-dir", str(run))
    for _ in range(3):
        more = draw.randint(5, 16)
        ranks = start(target, *flags, world_size=world_size, folder=tmp_path)
        wanted = num_records(run) + more
        until(lambda wanted=wanted: num_records(run) >= wanted, ranks)
        ranks.kill()
        assert ranks.wait() == [-signal.SIGKILL] * world_size
        print(f"seed {SEED}: killed at record {num_records(run)} at world size {world_size}")
        newest_announced(run)
        target, flags = run, ("--resume",)
        world_size = 3 - world_size
    set_pace(recipe, 0)
    assert_resumes(run, uninterrupted, world_size)


def test_many_kills_in_a_row_at_random_points_still_arrive(uninterrupted, recipe, tmp_path):
    """One command that is repeated, with a fault in each attempt, until each run has arrived."""
    draw = random.Random(SEED)
    run, world_sizes = tmp_path / "run", itertools.cycle([1, 2])
    for number, world_size in enumerate(itertools.islice(world_sizes, KILLS), 1):
        if not run.exists():  # the run keeps these settings
            flags = draw.choice([(), (), ("--checkpoint-sync",), ("--strategy", "fsdp")])
        sharded = "fsdp" in flags and world_size > 1
        points = ["after a step", "before an evaluation", *WRITING, *(SHARDS * sharded)]
        point = draw.choice(points)
        if point == "within the copy" and "--checkpoint-sync" in flags:
            point = "before the checkpoint"
        nth = {"after a step": draw.randint(1, 6), "before an evaluation": 1}.get(
            point, draw.randint(1, 2)
        )
        rank = draw.randrange(world_size) if point in SHARDS else 0
        how = " ".join(flags) or "defaults"
        print(f"kill {number}, {point}, visit {nth}, {how} at world size {world_size}")
        announced = newest_announced(run) if run.exists() else 0
        kill(recipe, run, a_fault(point, nth, rank), "--resume", *flags, on=world_size)
        assert newest_announced(run) >= announced
        if number == KILLS or newest_announced(run) > STEPS - 20:
            assert_resumes(run, uninterrupted, next(world_sizes))
            shutil.rmtree(run)


@pytest.mark.parametrize("killed", [0, 1])
def test_when_one_of_two_ranks_is_killed_the_other_ends_by_itself_within_seconds(
    uninterrupted, recipe, tmp_path, killed
):
    nth = random.Random(f"{SEED}-{killed}").randint(5, 60)
    print(f"seed {SEED}: rank {killed} after step {nth}")
    run = tmp_path / "run"
    fault = Fault("after a step", nth, rank=killed)
    ranks = start(recipe, "--run-dir", str(run), faults=(fault,), world_size=2, folder=tmp_path)
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


def test_a_kill_between_an_evaluation_and_its_checkpoint_leaves_one_record_of_each(
    uninterrupted, recipe, tmp_path
):
    """A stop at the end of an epoch is resumed at the same step as the epoch's checkpoint."""
    run = tmp_path / "run"
    struck(recipe, run, Fault("after a step", 11, signum=signal.SIGTERM))
    assert read_index(run)["last"]["path"] == "checkpoint_step_11.pt"
    kill(recipe, run, Fault("before the checkpoint"), "--resume", on=2)
    assert [r["event"] for r in all_records(run)][-2:] == ["epoch", "evaluation"]
    assert_resumes(run, uninterrupted, 1)


@pytest.mark.parametrize("point", ["before the test's record", "after the test's record"])
def test_a_kill_at_the_very_end_leaves_one_evaluation_of_the_test_set(
    uninterrupted, recipe, tmp_path, point
):
    kill(recipe, tmp_path / "run", Fault(point))
    assert_resumes(tmp_path / "run", uninterrupted, 1)


def test_a_torn_temporary_file_is_removed_though_its_name_never_comes_again(recipe, tmp_path):
    run = tmp_path / "run"
    kill(recipe, run, Fault("within the checkpoint", 2, num_bytes=4096))
    assert [p.name for p in run.rglob("*.tmp")] == [".checkpoint_step_8.pt.tmp"]
    resumed(run, "--checkpoint-every-steps", "1000", "--max-steps", "12")
    assert not list(run.rglob("*.tmp"))


def test_a_torn_last_record_is_cut_away_and_the_ones_before_stay(recipe, tmp_path):
    run = tmp_path / "run"
    trained(recipe, run, "--max-steps", "9")
    whole = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(whole + b'{"event": "step", "step": 10, "lo')
    resumed(run, "--max-steps", "13")
    assert (run / "events.jsonl").read_bytes().startswith(whole)
    assert len(all_records(run)) > whole.count(b"\n")
    assert [r["step"] for r in all_records(run) if r["event"] == "step"] == [*range(1, 14)]


def test_every_point_of_writing_is_one_that_can_be_struck():
    assert {p.partition(":")[0] for p in [*WRITING, *SHARDS]} <= {*POINTS, "within the checkpoint"}
