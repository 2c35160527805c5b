"""`run.carry` in a loop of the user's own: truncated BPTT on any ranks, killed and resumed."""

import signal

import pytest

from tests.session import scripts
from tests.tiny import events

LOOP = """
import sys
import torch
from torch import nn
import samestep

text = torch.randint(0, 9, (4 * 47 + 1,), generator=torch.Generator().manual_seed(0))
data = text[:-1].view(-1, 4), text[1:].view(-1, 4)

def new_hidden(rows):
    return torch.zeros(rows, 6)

with samestep.open_run("run", resume=True, log_every=1, checkpoint_every_steps=1) as run:
    embed, cell, out = nn.Embedding(9, 5), nn.GRU(5, 6, batch_first=True), nn.Linear(6, 9)
    model = run.place(nn.ModuleList([embed, cell, out]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for epoch in run.epochs(2, state={"model": model, "optimizer": optimizer}):
        for batch in run.batches(data, 7, order="columns", carry=new_hidden):
            x, y = batch.data
            found, hidden = cell(embed(x), run.carry.unsqueeze(0))
            run.carry = hidden.squeeze(0)
            loss = nn.functional.cross_entropy(out(found).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            run.backward(loss, model)
            optimizer.step()
            run.log(loss=loss)
"""


def losses(folder):
    return [record["loss"] for record in events(folder / "run", "step")]


def written(folder, *changes):
    text = LOOP
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "loop.py").write_text(text)
    return folder / "loop.py"


def test_it_goes_on_after_a_kill_on_another_number_of_ranks(tmp_path):
    straight, killed, anew = (tmp_path / name for name in ("straight", "killed", "anew"))
    for folder in (straight, killed, anew):
        folder.mkdir()
    scripts.run(written(straight), world_size=3, folder=straight)
    assert len(losses(straight)) == 14
    script = written(killed)
    strike = scripts.Strike(4, signal.SIGKILL, rank=None)
    ranks = scripts.start(script, world_size=2, folder=killed, strike=strike)
    assert ranks.wait() == [-signal.SIGKILL] * 2
    assert scripts.run_here(script) == 0
    assert losses(killed) == pytest.approx(losses(straight), rel=1e-11)
    assert scripts.run_here(written(anew, ("run.carry = hidden.squeeze(0)", "pass"))) == 0
    assert losses(anew)[1] != pytest.approx(losses(straight)[1], rel=1e-6)


def test_one_state_a_rank_goes_on_on_as_many_ranks(tmp_path):
    of_rank = (
        "def new_hidden(rows):\n    return torch.zeros(rows, 6)",
        "def new_hidden():\n    return torch.full((), run.rank + 1.0)",
    )
    used = ("run.carry.unsqueeze(0)", "torch.zeros(1, len(x), 6)")
    left = ("run.carry = hidden.squeeze(0)", "hidden, run.carry = run.carry, run.carry * 2")
    logged = ("run.log(loss=loss)", "run.log(loss=loss, hidden=hidden)")
    script = written(tmp_path, of_rank, used, left, logged)
    strike = scripts.Strike(4, signal.SIGKILL, rank=None)
    ranks = scripts.start(script, world_size=2, folder=tmp_path, strike=strike)
    assert ranks.wait() == [-signal.SIGKILL] * 2
    scripts.run(script, world_size=2, folder=tmp_path)
    steps = events(tmp_path / "run", "step")
    shares = [(4, 3)] * 6 + [(3, 2)]  # of 7, and of the last 5 samples of an epoch
    means = [(a + 2 * b) * 2**k / (a + b) for k, (a, b) in enumerate(shares)] * 2
    assert [step["hidden"] for step in steps] == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        ("run.carry = hidden.squeeze(0)", "run.carry = None"),
        ("run.carry = hidden.squeeze(0)", "run.carry = hidden"),
        ("run.carry = hidden.squeeze(0)", "run.carry = hidden.squeeze(0)[:, :3]"),
        (", carry=new_hidden", ""),
        ("torch.zeros(rows, 6)", "torch.zeros(6)"),
    ],
)
def test_state_that_cannot_be_carried_is_refused(change, tmp_path, refused_here):
    assert refused_here(written(tmp_path, change))
