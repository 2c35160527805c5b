"""`samestep.gather` in a loop of the user's own: the whole batch on every rank, with gradients."""

import pytest
import torch

import samestep
from samestep import UserError
from tests.session import scripts
from tests.tiny import events

LOOP = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import samestep

x = torch.randn(29, 2, 8, generator=torch.Generator().manual_seed(0))
with samestep.open_run(sys.argv[1], log_every=1) as run:
    net = run.place(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in run.epochs(2, state={"net": net, "optimizer": optimizer}):
        for batch in run.batches(x, global_batch_size=9):  # of the last 2, a third rank has none
            one, other = (F.normalize(net(batch.data[:, k]), dim=1) for k in (0, 1))
            one, other = samestep.gather(one), samestep.gather(other)
            loss = F.cross_entropy(5 * one @ other.T, torch.arange(batch.global_size))
            optimizer.zero_grad()
            run.backward(loss, net)
            optimizer.step()
            run.log(loss=loss, slope=net[0].weight.grad.norm())
"""


def test_a_contrastive_loop_is_the_same_on_any_number_of_ranks(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    for ranks in (1, 2, 3):
        scripts.run(script, str(ranks), world_size=ranks, folder=tmp_path)
    one, *others = ([*map(_numbers, events(tmp_path / str(n), "step"))] for n in (1, 2, 3))
    assert len(one) == 8
    for other in others:
        assert other == [pytest.approx(numbers, rel=1e-11) for numbers in one]


def _numbers(record):
    return record["step"], record["loss"], record["slope"]


def test_a_rank_that_leaves_it_out_is_told_and_nobody_waits(tmp_path):
    script = tmp_path / "loop.py"
    only = "one, other = (samestep.gather(v) if run.is_main else v for v in (one, other))"
    skipped = LOOP.replace("one, other = samestep.gather(one), samestep.gather(other)", only)
    script.write_text(skipped.replace("batch.global_size", "len(one)"))
    assert "samestep.gather" in scripts.refused(script, "run", world_size=2, folder=tmp_path)


def test_rows_that_do_not_fit_those_of_another_rank_are_refused(tmp_path):
    script = tmp_path / "loop.py"
    wrong = LOOP.replace("samestep.gather(one)", "samestep.gather(one[:, :8 - run.rank])")
    script.write_text(wrong)
    told = scripts.refused(script, "run", world_size=2, folder=tmp_path)
    assert "rank 1" in told
    assert "(7,)" in told


@pytest.mark.parametrize(
    "place", ["for batch in run.batches(x, 9): pass\n        samestep.gather(x)", "validation"]
)
def test_outside_of_a_training_batch_it_is_refused(place, tmp_path):
    script, head = tmp_path / "loop.py", LOOP.partition("        for batch in")[0]
    inside = place
    if place == "validation":
        inside = "for batch in run.validation(x, 9): samestep.gather(batch.data)"
    script.write_text(f"{head}        {inside}\n")
    assert scripts.refused(script, "run", folder=tmp_path)


def test_after_setup_distributed_it_needs_no_run():
    x = torch.ones(3, 2)
    samestep.dist.setup_distributed(device="cpu")
    assert samestep.gather(x) is x
    samestep.dist.cleanup()
    with pytest.raises(UserError):
        samestep.gather(x)


def test_after_a_run_that_failed_it_is_refused(tmp_path):
    with pytest.raises(RuntimeError), samestep.open_run(tmp_path / "run"):
        raise RuntimeError
    with pytest.raises(UserError):
        samestep.gather(torch.ones(3, 2))


def test_without_a_run_it_is_refused():
    for given in (torch.ones(3, 2), torch.ones(()), [1.0]):
        with pytest.raises(UserError):
            samestep.gather(given)
