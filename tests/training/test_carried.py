"""State of a slot goes on from step to step: on any ranks, in micro-steps, killed and resumed."""

import signal
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from samestep.core.session.prediction import predict_split
from samestep.core.session.trained_model import open_checkpoint
from tests import tiny
from tests.faults import Fault
from tests.session.test_pictures import told

# A text is read in 7 columns of 7 or 6 pieces: the last step of an epoch has 5 of 7 slots.
RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits
PIECE, WORDS, HIDDEN, DROPOUT = 4, 20, 6, 0.0
def pieces():
    text = torch.randint(0, WORDS, (PIECE * 60 + 1,), generator=torch.Generator().manual_seed(0))
    return text[:-1].view(-1, PIECE), text[1:].view(-1, PIECE)
def data():
    x, y = pieces()
    return Splits(train=(x[:47], y[:47]), validation=(x[47:], y[47:]))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.rnn = nn.LSTM(5, HIDDEN, 2, dropout=DROPOUT)
        self.out = nn.Linear(HIDDEN, WORDS)
    def forward(self, x, hidden):
        found, hidden = self.rnn(self.embed(x.T), hidden)
        return self.out(found).transpose(0, 1), hidden
def carry(rows):
    return torch.zeros(rows, 2, HIDDEN), torch.ones(rows, 2, HIDDEN)
def forward(model, batch, carried):
    outputs, carried = model(batch[0], tuple(s.transpose(0, 1).contiguous() for s in carried))
    return outputs, tuple(state.transpose(0, 1) for state in carried)
def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())
recipe = Recipe(
    show=lambda outputs, batch: [{"words": piece.tolist()} for piece in batch[0]],
    model=Net, data=data, loss=loss, forward=forward, carry=carry, metrics={},
    settings={"order": "columns", "epochs": 2, "batch_size": 7, "lr": 1.0, "optimizer": "sgd"},
)
"""
FLAGS = ("--precision", "fp64", "--log-every", "1", "--checkpoint-every-steps", "1")


def written(folder, *changes):
    text = tiny.changed(RECIPE, *changes)
    if "KEPT" in text:  # state outside of what is carried, which holds the graph
        text = text.replace("    return outputs,", "    KEPT.append(carried)\n    return outputs,")
        text = text.replace("def carry(", "KEPT = []\ndef carry(")
    return tiny.write_recipe(folder, text, "words.py")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    tiny.trained(written(folder), folder / "run", *FLAGS)
    return folder


def test_it_is_truncated_bptt_as_one_writes_it_by_hand(alone):
    made: dict = {"__name__": "words"}
    exec(compile(RECIPE, "words.py", "exec"), made)
    torch.manual_seed(42)
    x, y = (part[:47] for part in made["pieces"]())
    samples = iter(range(47))
    columns = [list(islice(samples, size)) for size in (7, 7, 7, 7, 7, 6, 6)]
    model = made["Net"]().double()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(2):
        hidden = tuple(s.double() for s in made["carry"](7))
        for row in range(7):
            rows = torch.tensor([c[row] for c in columns if row < len(c)])
            hidden = tuple(s[: len(rows)].detach() for s in hidden)
            outputs, hidden = made["forward"](model, (x[rows], y[rows]), hidden)
            loss = made["loss"](outputs, (x[rows], y[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    run = [record["loss"] for record in tiny.events(alone / "run", "step")]
    assert run == pytest.approx(losses, rel=1e-12)


def test_what_is_predicted_or_shown_is_of_the_sample_that_it_names(alone):
    opened = open_checkpoint(alone / "run", "last", device="cpu")
    pieces = opened.recipe.load_data(opened.options).validation[0].tolist()
    found = predict_split(opened, "validation", top=1)
    assert [(one.row, one.values["words"]) for one in found] == [*enumerate(pieces, 1)]
    rows = told(SimpleNamespace(path=alone / "run"))["samples"]["rows"]
    assert [row["words"] for row in rows] == [pieces[row["sample"]] for row in rows]


def test_ranks_micro_steps_and_resumes_carry_what_one_process_does(alone, tmp_path):
    recipe = alone / "words.py"
    micro = (*FLAGS[:4], "--micro-batch-size", "2")
    tiny.trained(recipe, tmp_path / "micro", *micro, on=3)
    tiny.assert_same_training(tmp_path / "micro", alone / "run", 1e-11)
    fault = Fault("after a step", 3, signal.SIGKILL, rank=None)
    tiny.struck(recipe, tmp_path / "run", fault, *FLAGS, on=2)
    tiny.resumed(tmp_path / "run", "--max-steps", "7")
    tiny.resumed(tmp_path / "run", "--max-steps", "14", on=3)
    tiny.assert_same_training(tmp_path / "run", alone / "run", 1e-11)


def test_with_virtual_ranks_the_bits_are_equal_after_a_resume_on_other_ranks(tmp_path):
    dropout = ("DROPOUT = 4, 20, 6, 0.0", "DROPOUT = 4, 20, 6, 0.3")
    in_place = ("    outputs, carried = m", "    carried[0].add_(0.1)\n    outputs, carried = m")
    recipe = written(tmp_path, dropout, in_place)
    flags = ("--virtual-ranks", "3", "--log-every", "1", "--checkpoint-every-steps", "1")
    tiny.trained(recipe, tmp_path / "one", *flags)
    stop = Fault("after a step", 4, signal.SIGTERM, rank=None)
    tiny.struck(recipe, tmp_path / "run", stop, *flags, on=2)
    tiny.resumed(tmp_path / "run")
    tiny.assert_same_training(tmp_path / "run", tmp_path / "one", 0)


def test_what_an_epoch_left_goes_on_where_the_recipe_takes_it(tmp_path):
    kept = ("def carry(rows):", "def carry(rows, carried=None):\n    if carried: return carried")
    recipe = written(tmp_path, kept)
    tiny.trained(recipe, tmp_path / "run", *FLAGS)
    tiny.trained(recipe, tmp_path / "stopped", *FLAGS, "--epochs", "1")
    left = tiny.last_state(tmp_path / "stopped")["carried"]
    assert [tuple(s.shape) for s in left] == [(7, 2, 6)] * 2
    assert left[0].abs().min() > 0
    tiny.resumed(tmp_path / "stopped", "--epochs", "2")
    tiny.assert_same_training(tmp_path / "stopped", tmp_path / "run", 0)
    anew = written(tmp_path / "run", (kept[0], kept[0]))
    tiny.trained(anew, tmp_path / "anew", *FLAGS)
    pair = [tiny.events(tmp_path / run, "epoch")[-1]["loss"] for run in ("run", "anew")]
    assert pair[0] != pair[1]


RETURNED = "tuple(state.transpose(0, 1) for state in carried)"
WRONG = {
    "returned None": (RETURNED, "None"),
    "no pair": (f"return outputs, {RETURNED}", "return 1"),
    "other rows": (RETURNED, "carried"),
    "another shape": (RETURNED, RETURNED.replace(" for", "[:, :1] for")),
    "made None": ("return torch.zeros(rows, 2, HIDDEN), torch.ones(rows, 2, HIDDEN)", "pass"),
    "made of other rows": ("torch.zeros(rows, 2", "torch.zeros(1, 2"),
    "made badly": ("torch.zeros(rows, 2", "torch.zeros(rows / 2, 2"),
    "no forward": ("forward=forward, ", ""),
    "the graph is held": ("model(batch[0], tuple(", "model(batch[0], KEPT and KEPT[-1] or tuple("),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_state_that_cannot_be_carried_is_refused(change, tmp_path, refused):
    told = refused("train", str(written(tmp_path, change)), "--run-dir", str(tmp_path / "run"))
    assert "carr" in told  # it names the function, the field or the state
