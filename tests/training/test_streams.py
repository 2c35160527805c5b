"""A stream trains the same on any number of ranks, with workers, and when it is gone on with."""

import signal
from pathlib import Path

import pytest

from samestep import read_records
from samestep.base.errors import UserError
from samestep.base.settings import Settings
from samestep.core.plan import make_plan
from samestep.core.session.trained_model import evaluate_run
from tests import streams, tiny
from tests.command_line import start
from tests.faults import Fault
from tests.training.stops import stop_all

BUFFER = ("--shuffle-buffer", "10")
KINDS = {"plain": (), "shards": BUFFER, "uneven": (), "counted": BUFFER}
LIBRARIES = {"hugging face": BUFFER, "tar": ()}
WORKERS = ("--num-workers", "2", "--batch-size", "12", "--micro-batch-size", "2")


@pytest.mark.parametrize("kinds", [KINDS, pytest.param(LIBRARIES, marks=pytest.mark.slow)])
def test_two_ranks_with_workers_stopped_and_gone_on_with_on_one_are_the_same(tmp_path, kinds):
    """After step 17; one is killed after step 18, and goes on from step 16."""
    streams.write_tars(tmp_path / "tars")
    recipe = streams.write_recipe(tmp_path)
    tars = ("--tars", str(tmp_path / "tars"))
    words = {kind: ("--kind", kind, *tars, *flags) for kind, flags in kinds.items()}
    stop = Fault("after a step", 17, signum=signal.SIGTERM, rank=None)
    stops = [
        (stop, (recipe, "--run-dir", tmp_path / kind, *flags, *WORKERS))
        for kind, flags in words.items()
        if kind != "shards"
    ]
    stop_all(stops, on=2, folder=tmp_path, agree_every_s=0.0)
    if "shards" in kinds:
        kill, saved = Fault("after a step", 18, rank=None), ("--checkpoint-every-steps", "4")
        run = tmp_path / "shards"
        tiny.struck(recipe, run, kill, *saved, *words["shards"], *WORKERS, on=2)
    for kind, flags in words.items():
        run, whole = tmp_path / kind, tmp_path / f"{kind}, whole"
        assert tiny.last_state(run)["position"]["step"] == (16 if kind == "shards" else 17)
        tiny.trained(recipe, whole, *flags)
        tiny.resumed(run, "--num-workers", "0")
        tiny.assert_same_training(run, whole, 1e-9)


def refused(tmp_path: Path, *flags: str, world_size: int = 2) -> str:
    """Return what a training says that ends with exit code 2 on all ranks."""
    recipe = streams.write_recipe(tmp_path)
    command = ("train", str(recipe), "--run-dir", str(tmp_path / "run"), *flags)
    ranks = start(*command, world_size=world_size, folder=tmp_path)
    assert ranks.wait() == [2] * world_size, ranks.output()
    return ranks.output()


def test_an_element_that_fails_is_named_unless_it_comes_after_the_last_step(tmp_path):
    flags = ("--elements", "1100", "--fail", "1000", "--batch-size", "50")
    told = refused(tmp_path, *flags, "--num-workers", "1")
    assert "element 1,000" in told
    assert "flow.py:" in told
    last = [r["step"] for r in read_records(tmp_path / "run") if r["event"] == "step"][-1]
    assert last == 1000 // 50
    recipe, run = streams.write_recipe(tmp_path), tmp_path / "later"
    tiny.trained(recipe, run, "--max-steps", "3", "--fail", "36")
    assert tiny.last_state(run)["position"]["step"] == 3
    plan = make_plan(Settings(epochs=2, batch_size=4), 0, 2).record()
    unknown = {"num_samples", "steps_per_epoch", "total_steps", "log_every"}
    assert {name for name, value in plan.items() if value is None} == unknown


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ((), "split_by_node"),  # before the first step
        (("--elements", "132"), "[4, 5]"),  # elements of global batch 8
    ],
)
def test_a_stream_that_is_another_on_each_rank_ends_all_ranks(tmp_path, more, named):
    assert named in refused(tmp_path, "--kind", "by rank", *more)
    assert (tmp_path / "run" / "events.jsonl").exists() == bool(more)


def test_steps_may_end_it_within_an_epoch_and_no_rank_opens_the_shards_of_others(tmp_path):
    recipe = streams.write_recipe(tmp_path)
    runs = tmp_path / "at once", tmp_path / "gone on with"
    tiny.trained(recipe, runs[0], "--max-steps", "25")
    tiny.trained(recipe, runs[1], "--max-steps", "15")
    tiny.resumed(runs[1], "--max-steps", "25")
    assert [r["samples"] for r in read_records(runs[0]) if r["event"] == "epoch"] == [131, 131, 36]
    ours, theirs = map(tiny.last_state, runs)
    assert ours["position"]["step"] == theirs["position"]["step"] == 25
    for name, weight in ours["model"].items():
        assert weight.equal(theirs["model"][name])
    assert evaluate_run(runs[0], "last", split="train", device="cpu")["samples"] == 131
    (tmp_path / "opened").mkdir()
    tiny.trained(recipe, tmp_path / "run", "--kind", "shards", "--epochs", "1", on=2)
    opened = {path.name for path in (tmp_path / "opened").iterdir()}
    # 7 lanes for 12 slots: the first three fill slots 0 to 5, which are those of rank 0.
    # By the first one the ranks see that they read the same.
    assert opened == {*(f"0-{n}" for n in range(3)), *(f"1-{n}" for n in (0, 3, 4, 5, 6))}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"schedule": "cosine"}, "--max-steps"),
        ({"sync_batchnorm": True}, "--sync-batchnorm"),
        ({"engine": "lightning"}, "--engine lightning"),
        ({"batch_size": 1}, "2 ranks"),
    ],
)
def test_what_a_stream_does_not_go_with_is_refused_by_name(changed, named):
    settings = Settings(**{"epochs": 1, "batch_size": 4, **changed})
    with pytest.raises(UserError, match=named):
        make_plan(settings, 0, 2)
