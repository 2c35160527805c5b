"""A loop of one's own with all that a script may do: the same on any number of ranks, resumed."""

import signal

import pytest

from samestep import read_records
from tests.session.same import account, assert_close, assert_same
from tests.session.scripts import Strike, run, run_here, weights

# Words of different lengths, a loss per word, a validation, a schedule, draws at every place.
SCRIPT = """
import random, sys
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
import samestep

class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 23
    def __getitem__(self, index):
        return torch.linspace(0, 1, 2 + index % 5) + 0.01 * torch.randn(1)

def collate(words):
    return {"x": pad_sequence(words, batch_first=True), "n": torch.tensor([*map(len, words)])}

DROPOUT = float(sys.argv[1])
with samestep.open_run("run", seed=3, resume=True, log_every=1, checkpoint_every_steps=1,
                       settings={"dropout": DROPOUT}, keep_newest=3) as run:
    model = run.place(nn.Sequential(nn.Linear(1, 8), nn.Dropout(DROPOUT), nn.Linear(8, 1)))
    unused = run.place(nn.Linear(1, 1))
    optimizer = torch.optim.Adam([*model.parameters(), *unused.parameters()], lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    held_out = torch.rand(11, 4, 1)
    state = {"model": model, "unused": unused, "optimizer": optimizer, "schedule": schedule}
    data = Words()
    for epoch in run.epochs(3, state=state):
        for batch in run.batches(data, 11, collate=collate, num_workers=int(sys.argv[2])):
            x, n = batch.data["x"].unsqueeze(2), batch.data["n"]
            there = torch.arange(x.shape[1]) < n[:, None]
            noise = batch.normal(7, 1)[:, :x.shape[1]]
            error = (model(x + noise) - x).square().squeeze(2)
            words = there.sum()
            optimizer.zero_grad()
            run.backward((error * there).sum() / words / 2, optimizer, terms=words)
            run.backward((error.detach() * 0 + model(x + batch.uniform(1, 1)).squeeze(2) * there)
                         .sum() / words / 2, optimizer, terms=words)
            optimizer.step()
            run.log(loss=(error * there).sum() / words, terms=words)
            run.log(drawn=batch.uniform(), lr=schedule.get_last_lr()[0]) if len(x) == 1 else None
            if DROPOUT:
                run.log(own=torch.rand(()), also=random.random())
        schedule.step()
        shift = float(torch.rand(()))
        model.eval()
        with torch.no_grad():
            for batch in run.validation(held_out, 3):
                loss = (model(batch.data + shift) - batch.data).square().mean()
                run.log(loss=loss, largest=batch.data.abs().mean())
        model.train()
        print(epoch, sorted(run.means))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "words.py"
    path.write_text(SCRIPT)
    return path


def test_a_mean_over_words_is_the_same_on_any_number_of_ranks(script, tmp_path):
    alone, three = (tmp_path / name for name in ("alone", "three"))
    for folder in (alone, three):
        folder.mkdir()
    assert run_here(script, "0", "0", folder=alone) == 0
    ranks = run(script, "0", "1", world_size=3, folder=three)
    assert "2 ['largest', 'loss']" in ranks.printed(0)
    names = ("event", "step", "epoch", "loss", "split", "largest", "samples")
    ours, theirs = (
        [{k: r[k] for k in names if k in r} for r in account(folder / "run")]
        for folder in (three, alone)
    )
    assert [r["event"] for r in ours].count("evaluation") == 3
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert_close(weights(three / "run"), weights(alone / "run"), 1e-9)


@pytest.mark.parametrize(("world_size", "nth"), [(1, 3), (2, 5)])
def test_with_dropout_and_draws_a_resumed_run_is_the_same(script, tmp_path, world_size, nth):
    for folder, strike, code in (("whole", None, 0), ("parts", Strike(nth, signal.SIGTERM), 143)):
        (tmp_path / folder).mkdir()
        where = {"world_size": world_size, "folder": tmp_path / folder}
        run(script, "0.5", "0", **where, strike=strike, code=code)
    stopped = [r["step"] for r in read_records(tmp_path / "parts/run") if r["event"] == "stop"]
    assert stopped == [nth] if world_size == 1 else nth <= stopped[0] < 9
    run(script, "0.5", "0", world_size=world_size, folder=tmp_path / "parts")
    assert_same(tmp_path / "parts" / "run", tmp_path / "whole" / "run", tolerance=0)
    assert {"own", "also"} <= account(tmp_path / "whole" / "run")[0].keys()
