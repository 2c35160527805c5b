"""A stream trains the same on any number of ranks, with workers, and when it is gone on with."""

from pathlib import Path

import pytest

from samestep import read_records
from samestep.errors import UserError
from samestep.session.trained_model import evaluate_run
from samestep.settings import Settings
from samestep.training.plan import make_plan
from tests import streams, tiny
from tests.faults import Fault
from tests.processes import samestep

BUFFER = ("--shuffle-buffer", "10")
KINDS = {
    "plain": (),
    "shards": BUFFER,
    "uneven": (),
    "counted": BUFFER,
    "hugging face": BUFFER,
    "tar": (),
}


@pytest.fixture(scope="module", params=KINDS)
def alone(request, tmp_path_factory):
    """Give a recipe, its flags, and the run of a single process."""
    folder = tmp_path_factory.mktemp("alone")
    if request.param == "tar":
        streams.write_tars(folder / "tars")
    recipe = streams.write_recipe(folder)
    flags = ("--kind", request.param, "--tars", str(folder / "tars"), *KINDS[request.param])
    tiny.trained(recipe, folder / "run", *flags)
    return recipe, flags, folder / "run"


WORKERS = ("--num-workers", "2", "--batch-size", "12", "--micro-batch-size", "2")


def test_two_ranks_with_workers_killed_and_gone_on_with_on_one_are_the_same(alone, tmp_path):
    recipe, flags, reference = alone
    run, kill = tmp_path / "run", Fault("after a step", 18, rank=None)
    tiny.struck(recipe, run, kill, "--checkpoint-every-steps", "4", *flags, *WORKERS, on=2)
    assert tiny.last_state(run)["position"]["step"] == 16
    tiny.resumed(run, "--num-workers", "0")
    tiny.assert_same_training(run, reference, 1e-9)


def refused(tmp_path: Path, *flags: str, world_size: int = 2) -> str:
    """Return what a training says that ends with exit code 2 on all ranks."""
    recipe = streams.write_recipe(tmp_path)
    command = ("train", str(recipe), "--run-dir", str(tmp_path / "run"), *flags)
    ranks = samestep(*command, world_size=world_size, folder=tmp_path)
    assert ranks.wait() == [2] * world_size, ranks.output()
    return ranks.output()


def test_an_element_that_fails_in_a_worker_is_named_and_ends_all_ranks(tmp_path):
    flags = ("--elements", "10100", "--fail", "10000", "--batch-size", "500")
    told = refused(tmp_path, *flags, "--num-workers", "1")
    assert "element 10,000" in told
    assert "flow.py:" in told
    last = [r["step"] for r in read_records(tmp_path / "run") if r["event"] == "step"][-1]
    assert last == 10_000 // 500


def test_a_stream_that_divides_itself_by_rank_is_refused_before_the_first_step(tmp_path):
    assert "split_by_node" in refused(tmp_path, "--kind", "by rank")
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_stream_that_ends_elsewhere_on_another_rank_ends_all_ranks(tmp_path):
    told = refused(tmp_path, "--kind", "by rank", "--elements", "132")
    assert "[4, 5]" in told  # elements of global batch 8


def test_no_rank_opens_the_shards_of_others(tmp_path):
    (tmp_path / "opened").mkdir()
    recipe = streams.write_recipe(tmp_path)
    tiny.trained(recipe, tmp_path / "run", "--kind", "shards", "--epochs", "1", on=2)
    opened = {path.name for path in (tmp_path / "opened").iterdir()}
    # 7 lanes for 12 slots: the first three fill slots 0 to 5, which are those of rank 0.
    # By the first one the ranks see that they read the same.
    assert opened == {*(f"0-{n}" for n in range(3)), *(f"1-{n}" for n in (0, 3, 4, 5, 6))}


def test_steps_may_end_it_within_an_epoch_and_more_steps_go_on(tmp_path):
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


def test_what_comes_after_the_last_step_may_be_broken(tmp_path):
    recipe, run = streams.write_recipe(tmp_path), tmp_path / "run"
    tiny.trained(recipe, run, "--max-steps", "3", "--fail", "36")
    assert tiny.last_state(run)["position"]["step"] == 3


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


def test_the_plan_of_a_stream_says_what_nobody_knows():
    plan = make_plan(Settings(epochs=2, batch_size=4), 0, 2).record()
    unknown = {"num_samples", "steps_per_epoch", "total_steps", "log_every"}
    assert {name for name, value in plan.items() if value is None} == unknown
