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
    assert scripts.run_here(script, "alone") == 0
    scripts.run(script, "three", world_size=3, folder=tmp_path)
    alone, three = (
        [(step["step"], step["loss"], step["slope"]) for step in events(tmp_path / name, "step")]
        for name in ("alone", "three")
    )
    assert len(alone) == 8
    assert three == [pytest.approx(numbers, rel=1e-11) for numbers in alone]


ONLY = "(samestep.gather(v) if run.is_main else v for v in (one, other))"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samestep.gather(one), samestep.gather(other)": ONLY}, "samestep.gather"),
        ({"samestep.gather(one)": "samestep.gather(one[:, :8 - run.rank])"}, "(7,)"),
    ],
    ids=["left out", "other rows"],
)
def test_what_one_rank_does_otherwise_is_told_and_nobody_waits(tmp_path, changes, told):
    script, text = tmp_path / "loop.py", LOOP
    for old, new in {**changes, "batch.global_size": "len(one)"}.items():
        assert old in text
        text = text.replace(old, new)
    script.write_text(text)
    assert told in scripts.refused(script, "run", world_size=2, folder=tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        "for batch in run.batches(x, 9): pass\n        samestep.gather(x)",
        "for batch in run.validation(x, 9): samestep.gather(batch.data)",
    ],
    ids=["after the batches", "validation"],
)
def test_outside_of_a_training_batch_it_is_refused(place, tmp_path, refused_here):
    script, head = tmp_path / "loop.py", LOOP.partition("        for batch in")[0]
    script.write_text(f"{head}        {place}\n".replace("sys.argv[1]", "'run'"))
    assert "samestep.gather" in refused_here(script)


def test_outside_of_a_run_it_is_refused_but_where_the_ranks_are_set_up(tmp_path):
    x = torch.ones(3, 2)
    for given in (x, torch.ones(()), [1.0]):
        with pytest.raises(UserError):
            samestep.gather(given)
    samestep.dist.setup_distributed(device="cpu")
    assert samestep.gather(x) is x
    samestep.dist.cleanup()
    with pytest.raises(RuntimeError), samestep.open_run(tmp_path / "run"):
        raise RuntimeError
    with pytest.raises(UserError):
        samestep.gather(x)
