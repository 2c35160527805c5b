"""A stream trains the same on any number of ranks, with workers, and when it is gone on with."""

import signal

import pytest

from tests import streams, tiny
from tests.faults import Fault

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
    tiny.train(recipe, "--run-dir", str(folder / "run"), *flags, folder=folder)
    return recipe, flags, folder / "run"


@pytest.mark.parametrize(
    ("world_size", "more"),
    [(2, ("--num-workers", "2", "--global-batch-size", "12", "--batch-size", "2")), (3, ())],
)
def test_it_is_the_same_training_on_several_ranks_and_with_workers(
    alone, tmp_path, world_size, more
):
    recipe, flags, reference = alone
    run = tmp_path / "run"
    flags = ("--run-dir", str(run), *flags, *more)
    tiny.train(recipe, *flags, world_size=world_size, folder=tmp_path)
    tiny.assert_same_training(run, reference, 1e-9)


def test_it_goes_on_on_another_number_of_ranks(alone, tmp_path):
    recipe, flags, reference = alone
    run = tmp_path / "run"
    stop = Fault("after a step", 15, signal.SIGTERM, rank=None)
    flags = ("--run-dir", str(run), "--num-workers", "1", *flags)
    ranks = tiny.start(recipe, *flags, faults=(stop,), world_size=2, folder=tmp_path)
    assert ranks.wait() == [128 + signal.SIGTERM] * 2, ranks.output()
    tiny.resume(run, world_size=1, folder=tmp_path)
    tiny.assert_same_training(run, reference, 1e-9)
