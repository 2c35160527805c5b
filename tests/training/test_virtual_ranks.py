"""With virtual ranks every bit is the same on any number of ranks, dropout and BatchNorm included.

63 samples and a global batch of 15: the last batch of an epoch has 3 samples, so that of 5 virtual
ranks 2 have none.
"""

import json
import tomllib

import pytest
import torch
from torch import nn

from samestep.errors import UserError
from samestep.training.buffers import StepBuffers
from tests import tiny
from tests.command_line import call, refusal
from tests.faults import Fault
from tests.processes import start_ranks

RECIPE = """
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from samestep import Recipe, Splits

@dataclass(frozen=True)
class Options:
    kind: str = "mlp"

class Texts(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        if kind == "lstm":
            self.inner = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        else:
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))

    def forward(self, x):
        hidden = self.embedding(x)
        hidden = self.inner(hidden)[0] if isinstance(self.inner, nn.LSTM) else self.inner(
            hidden, mask=self.mask)
        return self.head(hidden.mean(dim=1))

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.first(x) if x.sum() > 0 else self.second(x) + random.random() + np.random.rand()

class Drawn(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]

def data(options):
    generator = torch.Generator().manual_seed(7)
    if options.kind in ("lstm", "transformer"):
        x = torch.randint(0, 11, (80, 6), generator=generator)
        y = x[:, 0] % 3
    else:
        shape = (3, 8, 8) if options.kind == "conv" else (8,)
        x = torch.randn(80, *shape, generator=generator)
        y = x.flatten(1)[:, :3].argmax(dim=1)
    train = (x[:63], y[:63])
    if options.kind == "files":
        train = Drawn(*train)
    return Splits(train=train, validation=(x[63:], y[63:]))

def clamp(parameter):
    parameter.grad.clamp_(-0.01, 0.01)

class Repeated(nn.Module):  # a block in three checkpoints, each with a backward of its own
    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x + torch.tanh(checkpoint(self.block, x, use_reentrant=True))
        return self.head(x)

def model(options):
    if options.kind == "reentrant":
        return Repeated()
    if options.kind == "conv":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2),
            nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.Flatten(), nn.Linear(288, 3))
    if options.kind in ("lstm", "transformer"):
        return Texts(options.kind)
    if options.kind == "branches":
        return Branches()
    built = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.3),
                          nn.Linear(16, 3))
    for parameter in built.parameters() if options.kind == "hooked" else ():
        parameter.register_post_accumulate_grad_hook(clamp)
    return built

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

def accuracy(outputs, targets):
    return outputs.argmax(dim=1) == targets

recipe = Recipe(model=model, data=data, loss=loss, options=Options, metrics={"accuracy": accuracy},
    settings={"epochs": 2, "batch_size": 15, "lr": 0.01, "log_every": 1,
              "checkpoint_every_steps": 3, "virtual_ranks": 5})
"""
STEPS = 10
FLAGS = {
    "mlp": [],
    "conv": ["--kind", "conv"],
    "lstm": ["--kind", "lstm"],
    "transformer": ["--kind", "transformer"],
    "samples from files, by workers": ["--kind", "files"],
    "branches": ["--kind", "branches", "--find-unused"],
    "micro-steps, clipping": ["--kind", "conv", "--micro-batch-size", "1", "--clip-norm", "0.05"],
    "hooks on gradients": ["--kind", "hooked"],
    "bf16": ["--kind", "conv", "--precision", "bf16"],
    "fp16, steps left out": ["--precision", "fp16", "--lr", "10"],
    "an average of weights": ["--ema", "0.9", "--optimizer", "sgd", "--momentum", "0.9"],
    "gradients in several parts": ["--kind", "reentrant"],
    "channels last": ["--kind", "conv", "--channels-last", "--clip-norm", "0.05"],
}
# How the 5 parts lie on each number of ranks is the same for all. 2 ranks hold 3 and 2 of them, and
# add up across ranks what one rank adds up in place; 3 ranks hold 2, 2 and 1.
RANKS = {2: [*FLAGS], 3: ["mlp", "conv", "micro-steps, clipping", "fp16, steps left out"]}
MORE = {"samples from files, by workers": ["--num-workers", "2"]}


@pytest.fixture
def recipe(tmp_path):
    return tiny.write_recipe(tmp_path, RECIPE, "virtual.py")


def digests(run) -> dict[int, str]:
    """Return what the run's checkpoint records say of its weights, by step."""
    records = [r for r in tiny.all_records(run) if r["event"] == "checkpoint"]
    return {record["step"]: record["weights_sha256"] for record in records}


def assert_every_bit(run, reference):
    tiny.assert_same_training(run, reference, tolerance=0)
    assert digests(run) == digests(reference)
    ends = [json.loads((path / "result.json").read_text()) for path in (run, reference)]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"] == digests(run)[STEPS]


def test_every_recorded_number_and_every_weight_is_the_same_on_any_ranks(tmp_path, recipe, capfd):
    def run_of(name, ranks):
        return tmp_path / f"{name} on {ranks}"

    for name, flags in FLAGS.items():
        alone = run_of(name, 1)
        tiny.trained(recipe, alone, *flags)
        assert len({*digests(alone).values()}) > 2, name  # they do change
    for ranks, names in RANKS.items():
        words = [
            [recipe, "--run-dir", run_of(name, ranks), *FLAGS[name], *MORE.get(name, ())]
            for name in names
        ]
        tiny.train_all(words, on=ranks, folder=tmp_path)
        for name in names:
            assert_every_bit(run_of(name, ranks), run_of(name, 1))
    # The scale starts at 65536, and halves where gradients overflow.
    assert tiny.last_state(run_of("fp16, steps left out", 1))["scaler"]["scale"] < 65536
    # One device evaluates to the bits that several ranks recorded.
    *_, recorded = tiny.events(run_of("conv", 3), "evaluation")
    how = ["--checkpoint", "last", "--split", "validation", "--json"]
    capfd.readouterr()
    assert call("evaluate", str(run_of("conv", 3)), *how) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["loss"], found["accuracy"]) == (recorded["loss"], recorded["accuracy"])


@pytest.mark.slow
def test_a_compiled_model_has_the_same_bits_on_one_rank_and_on_two(tmp_path, recipe):
    runs = [tmp_path / f"on-{ranks}" for ranks in (1, 2)]
    for ranks, run in enumerate(runs, start=1):
        flags = ["--compile", "on", "--run-dir", str(run)]
        tiny.train(recipe, *flags, world_size=ranks, folder=tmp_path)
        assert any(record["event"] == "compile" for record in tiny.all_records(run))
    assert_every_bit(runs[1], runs[0])


def test_a_mean_over_terms_and_a_metric_of_all_predictions_have_the_same_bits(tmp_path, recipe):
    parts = """loss_terms=lambda batch: (batch[1] > 0).sum() + 1,
    metrics={"accuracy": accuracy, "auroc": torchmetrics.AUROC("multiclass", num_classes=3)}"""
    code = RECIPE.replace('metrics={"accuracy": accuracy}', parts)
    code = code.replace("import numpy as np\n", "import numpy as np\nimport torchmetrics\n")
    recipe.write_text(code)
    for ranks in (1, 2):
        tiny.trained(recipe, tmp_path / f"on-{ranks}", on=ranks)
    assert_every_bit(tmp_path / "on-2", tmp_path / "on-1")


@pytest.mark.parametrize(("before", "after", "saved", "step"), [(1, 2, 1, 3), (2, 1, 2, 5)])
def test_killed_within_an_epoch_or_after_it_it_goes_on_with_the_same_bits_on_other_ranks(
    tmp_path, recipe, before, after, saved, step
):
    whole, run, flags = tmp_path / "whole", tmp_path / "killed", ("--kind", "conv")
    tiny.trained(recipe, whole, *flags)
    fault = Fault("after the record", nth=saved)
    words = (*flags, "--run-dir", str(run))
    killed = tiny.start(recipe, *words, faults=(fault,), world_size=before, folder=tmp_path)
    assert killed.wait()[0] == -fault.signum, killed.output()
    assert tiny.newest_announced(run) == step
    tiny.resumed(run, on=after)
    assert_every_bit(run, whole)


def in_arrival_order(arguments):
    """Run the command line with gradients added rank after rank, as they come in."""
    import sys

    from samestep.cli import main
    from samestep.training import tree

    class Arriving(tree.TreeSum):
        def push(self, value, _number, _level=0):
            if self.roots:
                value = self._add(self.roots.pop().value, value)
            super().push(value, 0)

    tree.TreeSum = Arriving
    sys.exit(main(arguments))


def test_gradients_added_in_order_of_arrival_give_other_bits(tmp_path, recipe):
    """A fault planted in the sum shows in the digests: the tests above can fail."""
    tiny.trained(recipe, tmp_path / "alone")
    arguments = ["train", str(recipe), "--run-dir", str(tmp_path / "arriving")]
    ranks = start_ranks(in_arrival_order, 2, tmp_path / "output", arguments)
    assert ranks.wait() == [0] * 2, ranks.output()
    ours, theirs = digests(tmp_path / "arriving"), digests(tmp_path / "alone")
    assert ours.keys() == theirs.keys()
    assert ours[STEPS] != theirs[STEPS]


def test_without_virtual_ranks_other_ranks_give_other_bits_and_no_record_has_digests(
    tmp_path, recipe
):
    recipe.write_text(RECIPE.replace(', "virtual_ranks": 5', ""))
    ends = set()
    for ranks in (1, 2):
        run = tmp_path / f"on-{ranks}"
        tiny.trained(recipe, run, on=ranks)
        assert not any("weights_sha256" in r for r in tiny.all_records(run))
        ends.add(json.loads((run / "result.json").read_text())["weights_sha256"])
    assert len(ends) == 2


def test_what_decides_over_bits_is_kept_in_the_run_and_cannot_change(here, refused, recipe):
    tiny.trained(recipe, here / "run", "--threads", "2", "--epochs", "1")
    settings = tomllib.loads((here / "run" / "settings.toml").read_text())
    assert (settings["virtual_ranks"], settings["threads"]) == (5, 2)
    assert settings["deterministic"] is True
    (start,) = tiny.events(here / "run", "start")
    assert (start["virtual_ranks"], start["threads"]) == (5, 2)
    assert start["arithmetic"]["torch"] == torch.__version__
    state = tiny.last_state(here / "run")
    assert state["made_with"] == (here / "run" / "settings.toml").read_text()

    before = tiny.files(here / "run")
    for flags in (["--virtual-ranks", "3"], ["--threads", "1"], ["--channels-last"]):
        assert flags[0] in refused("train", "run", "--resume", "--epochs", "2", *flags)
        assert tiny.files(here / "run") == before

    records = here / "run" / "events.jsonl"
    records.write_text(records.read_text().replace(f'"{torch.__version__}"', '"1.0"'))
    tiny.resumed(here / "run", "--epochs", "2")
    *_, start = (r for r in tiny.all_records(here / "run") if r["event"] == "start")
    assert any("1.0" in note for note in start["notes"]), "the bits will differ"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--virtual-ranks", "16"], "--batch-size 15 is less than the 16 virtual ranks"),
        (["--virtual-ranks", "64", "--batch-size", "64"], "the 63 training samples"),
        (["--virtual-ranks", "0"], "--virtual-ranks"),
        (["--sync-batchnorm"], "--sync-batchnorm"),
        (["--engine", "lightning"], "--engine lightning"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused_by_name(here, refused, recipe, flags, named):
    assert named in refused("train", str(recipe), *flags, "--run-dir", "run")
    assert not (here / "run").exists()


def test_more_ranks_than_virtual_ones_are_refused(tmp_path, recipe):
    told = refusal(
        "train", str(recipe), "--virtual-ranks", "1", world_size=2, folder=tmp_path / "output"
    )
    assert "--virtual-ranks 1 is less than the 2 ranks" in told


PUT = """
class Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient).put_(torch.arange(gradient.numel()), gradient.flatten())

class Odd(nn.Module):
    def forward(self, x):
        return Put.apply(x)  # here

"""


@pytest.mark.parametrize("backward", [True, False])
def test_an_operation_without_a_deterministic_form_is_named_with_its_module_and_line(
    here, refused, recipe, backward
):
    code = RECIPE.replace("class Drawn", f"{PUT}class Drawn").replace(
        "nn.ReLU(), nn.Dropout(0.3)", "Odd(), nn.ReLU()"
    )
    if not backward:
        way = "Put.backward(None, x.detach()) + x"
        code = code.replace("Put.apply(x)", way)
    recipe.write_text(code)
    told = refused("train", str(recipe), "--run-dir", "run")
    lines = code.splitlines()
    line = next(n for n, text in enumerate(lines, start=1) if "# here" in text)
    if not backward:
        line = next(n for n, text in enumerate(lines, start=1) if ".put_(" in text)
    assert "put_" in told
    assert "Odd" in told
    assert f"{recipe}:{line}" in told


# --- buffers


class Buffers(nn.Module):
    """One buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
        self.register_buffer("count", torch.tensor(2**60 + 1))
        self.register_buffer("late", torch.zeros(1))


def step_of(module, buffers, moves, late=False):
    """Let virtual ranks 0, 1 … move the mean by so much; return what was added up."""
    buffers.begin()
    found = []
    for part, by in enumerate(moves):
        module.mean += by
        module.count += 1 + part
        if late:
            module.late += 1
        found.append(torch.cat(buffers.moved(part)))
    buffers.settle(sum(found[1:], start=found[0]), len(moves))


def test_buffers_move_by_the_mean_and_counts_are_those_of_virtual_rank_0():
    module = Buffers()
    buffers = StepBuffers(module, torch.float32)
    for _ in range(2):
        step_of(module, buffers, [0.5, 1.5, 4.0])
    assert module.mean.tolist() == [5.0, 6.0]
    assert module.count.item() == 2**60 + 3
    assert module.mask.tolist() == [float("-inf"), 0.0]


def test_a_buffer_that_changes_later_than_in_the_first_step_is_refused_by_name():
    module = Buffers()
    buffers = StepBuffers(module, torch.float32)
    step_of(module, buffers, [1.0, 1.0])
    with pytest.raises(UserError, match="late"):
        step_of(module, buffers, [1.0, 1.0], late=True)
