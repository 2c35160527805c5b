"""With virtual ranks every bit is the same on any number of ranks, dropout and BatchNorm included.

63 samples and a global batch of 15: the last batch of an epoch has 3 samples, so that of 5 virtual
ranks 2 have none. The tree of sums is the same for any number of ranks.
"""

import json
import math
import tomllib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from samestep.base.errors import UserError
from samestep.core.data.order import held_parts, part_of
from samestep.core.learner import tree
from samestep.core.learner.buffers import StepBuffers
from samestep.core.learner.tree import TreeReduce, TreeSum, add_up, roots_over
from samestep.core.training.snapshot import weights_sha256
from samestep.launch.ranks.world import World
from tests import tiny
from tests.faults import Fault
from tests.processes import run_ranks, start_ranks
from tests.training.odd_models import CHANGED as ODD_MODELS

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
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))
    def forward(self, x):
        hidden = self.embedding(x)
        return self.head(self.inner(hidden, mask=self.mask).mean(dim=1))
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)
    def forward(self, x):
        return self.first(x) if x.sum() > 0 else self.second(x) + random.random() + np.random.rand()
class Drawn(Dataset):
    def __init__(self, x, y): self.x, self.y = x, y
    def __len__(self): return len(self.x)
    def __getitem__(self, index): return self.x[index] + 0.1 * torch.randn(8), self.y[index]
def data(options):
    generator = torch.Generator().manual_seed(7)
    if options.kind == "transformer":
        x = torch.randint(0, 11, (80, 6), generator=generator)
        y = x[:, 0] % 3
    else:
        shape = (3, 8, 8) if options.kind == "conv" else (8,)
        x = torch.randn(80, *shape, generator=generator)
        y = x.flatten(1)[:, :3].argmax(dim=1)
    train = (x[:63], y[:63])
    if options.kind == "files": train = Drawn(*train)
    return Splits(train=train, validation=(x[63:], y[63:]))
def clamp(parameter): parameter.grad.clamp_(-0.01, 0.01)
class Repeated(nn.Module):  # a block in three checkpoints, each with a backward of its own
    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        x = self.first(x)
        for _ in range(3): x = x + torch.tanh(checkpoint(self.block, x, use_reentrant=True))
        return self.head(x)
def model(options):
    if options.kind == "reentrant": return Repeated()
    if options.kind == "conv":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2),
            nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.Flatten(), nn.Linear(288, 3))
    if options.kind == "transformer": return Texts()
    if options.kind == "branches": return Branches()
    built = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.3),
                          nn.Linear(16, 3))
    for parameter in built.parameters() if options.kind == "hooked" else ():
        parameter.register_post_accumulate_grad_hook(clamp)
    return built
def loss(outputs, targets): return nn.functional.cross_entropy(outputs, targets)
def accuracy(outputs, targets): return outputs.argmax(dim=1) == targets
recipe = Recipe(model=model, data=data, loss=loss, options=Options, metrics={"accuracy": accuracy},
    settings={"epochs": 1, "batch_size": 15, "lr": 0.01, "log_every": 1,
              "checkpoint_every_steps": 2, "virtual_ranks": 5})
"""
STEPS = 5
AVERAGE = ("--ema", "0.9", "--optimizer", "sgd", "--momentum", "0.9")
CLIPPED = ("--channels-last", "--clip-norm", "0.05")
FLAGS = {
    "conv": ["--kind", "conv"],
    "transformer": ["--kind", "transformer"],
    "samples from files, by workers": ["--kind", "files"],
    "branches": ["--kind", "branches", "--find-unused"],
    "micro-steps, an average": ["--kind", "conv", "--micro-batch-size", "1", *AVERAGE],
    "hooks on gradients": ["--kind", "hooked"],
    "fp16, steps left out": ["--precision", "fp16", "--lr", "10", "--epochs", "2"],
    "gradients in several parts": ["--kind", "reentrant"],
    "bf16, channels last, clipping": ["--kind", "conv", "--precision", "bf16", *CLIPPED],
}
# 2 ranks hold 3 and 2 of the 5 parts, and add up across ranks what one rank adds up in place; 3
# ranks hold 2, 2 and 1, which is the same for all.
RANKS = {2: [name for name in FLAGS if name != "conv"], 3: ["conv"]}
MORE = {"samples from files, by workers": ["--num-workers", "2"]}
# Recipes of their own, on three ranks: odd models, a mean over terms and a metric of all
# predictions, and what has no virtual ranks.
METRICS = """loss_terms=lambda batch: (batch[1] > 0).sum() + 1,
    metrics={"accuracy": accuracy, "auroc": torchmetrics.AUROC("multiclass", num_classes=3)}"""
OWN = {
    **ODD_MODELS,
    "measured": RECIPE.replace("import random\n", "import random\nimport torchmetrics\n").replace(
        'metrics={"accuracy": accuracy}', METRICS
    ),
    "plain": RECIPE.replace(', "virtual_ranks": 5', ""),
}


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
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"] == digests(run)[ends[0]["steps"]]


def test_complex_weights_are_in_the_digest_of_a_models_weights():
    layer = nn.Linear(2, 1, dtype=torch.complex64)
    before, _ = weights_sha256(layer), layer.weight.detach().mul_(2)
    assert weights_sha256(layer) != before


def test_every_number_and_every_weight_is_the_same_on_any_ranks(tmp_path, recipe, output_of):
    def run_of(name, ranks):
        return tmp_path / f"{name} on {ranks}"

    own = {name: tiny.write_recipe(tmp_path, text, f"{name}.py") for name, text in OWN.items()}
    for name in (*FLAGS, *own):
        tiny.trained(own.get(name, recipe), run_of(name, 1), *FLAGS.get(name, ()))
    for name in (*FLAGS, "measured"):
        assert len({*digests(run_of(name, 1)).values()}) > 2, name  # they do change
    for ranks, names in RANKS.items():
        words = [
            [recipe, "--run-dir", run_of(name, ranks), *FLAGS[name], *MORE.get(name, ())]
            for name in names
        ]
        if ranks == 3:
            words += [[path, "--run-dir", run_of(name, 3)] for name, path in own.items()]
        tiny.train_all(words, on=ranks, folder=tmp_path)
        for name in names:
            assert_every_bit(run_of(name, ranks), run_of(name, 1))
    for name in own.keys() - {"plain"}:
        tiny.assert_same_training(run_of(name, 3), run_of(name, 1), tolerance=0)
    # Without virtual ranks, other ranks give other bits, and no record has digests.
    assert not any("weights_sha256" in r for r in tiny.all_records(run_of("plain", 3)))
    ends = [json.loads((run_of("plain", on) / "result.json").read_text()) for on in (1, 3)]
    assert ends[0]["weights_sha256"] != ends[1]["weights_sha256"]
    # The scale starts at 65536, and halves where gradients overflow.
    assert tiny.last_state(run_of("fp16, steps left out", 1))["scaler"]["scale"] < 65536
    # One device evaluates to the bits that several ranks recorded.
    *_, recorded = tiny.events(run_of("conv", 3), "evaluation")
    how = ["--checkpoint", "last", "--split", "validation", "--json"]
    found = json.loads(output_of("evaluate", run_of("conv", 3), *how))
    assert (found["loss"], found["accuracy"]) == (recorded["loss"], recorded["accuracy"])


@pytest.mark.slow
def test_a_compiled_model_has_the_same_bits_on_one_rank_and_on_two(tmp_path, recipe):
    runs = [tmp_path / f"on-{ranks}" for ranks in (1, 2)]
    for ranks, run in enumerate(runs, start=1):
        flags = ["--compile", "on", "--run-dir", str(run)]
        tiny.train(recipe, *flags, world_size=ranks, folder=tmp_path)
        assert any(record["event"] == "compile" for record in tiny.all_records(run))
    assert_every_bit(runs[1], runs[0])


def test_killed_within_an_epoch_it_goes_on_with_the_same_bits_on_other_ranks(tmp_path, recipe):
    whole, run, flags = tmp_path / "whole", tmp_path / "killed", ("--kind", "conv", "--epochs", "2")
    tiny.trained(recipe, whole, *flags)
    fault = Fault("after the record")
    words = (*flags, "--run-dir", str(run))
    killed = tiny.start(recipe, *words, faults=(fault,), world_size=2, folder=tmp_path)
    assert killed.wait()[0] == -fault.signum, killed.output()
    assert tiny.newest_announced(run) == 2
    tiny.resumed(run)
    assert_every_bit(run, whole)


def in_arrival_order(arguments):
    """Run the command line with gradients added rank after rank, as they come in."""
    import sys

    from samestep.core.learner import tree
    from samestep.shell.cli import main

    class Arriving(tree.TreeSum):
        def push(self, value, _number, level=0):
            if self.roots:
                value = self._add(self.roots.pop().value, value)
            super().push(value, 0)

    tree.TreeSum = Arriving
    sys.exit(main(arguments))


def test_gradients_added_in_order_of_arrival_give_other_bits(tmp_path, recipe):
    tiny.trained(recipe, tmp_path / "alone")
    arguments = ["train", str(recipe), "--run-dir", str(tmp_path / "arriving")]
    ranks = start_ranks(in_arrival_order, 2, tmp_path / "output", arguments)
    assert ranks.wait() == [0] * 2, ranks.output()
    ours, theirs = digests(tmp_path / "arriving"), digests(tmp_path / "alone")
    assert ours.keys() == theirs.keys()
    assert ours[STEPS] != theirs[STEPS]


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
    others = ["--virtual-ranks", "3"], ["--threads", "1"], ["--channels-last"], ["--find-unused"]
    for flags in others:
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


PUT = """
class Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient).put_(torch.arange(gradient.numel()), gradient.flatten())
class Odd(nn.Module):
    def forward(self, x): return Put.apply(x)  # here
"""


@pytest.mark.parametrize("backward", [True, False])
def test_an_operation_that_is_not_deterministic_is_named(here, refused, recipe, backward):
    code = RECIPE.replace("class Drawn", f"{PUT}class Drawn").replace(
        "nn.ReLU(), nn.Dropout(0.3)", "Odd(), nn.ReLU()"
    )
    if not backward:
        code = code.replace("Put.apply(x)", "Put.backward(None, x.detach()) + x")
    recipe.write_text(code)
    told = refused("train", str(recipe), "--run-dir", "run")
    place = "# here" if backward else ".put_("
    line = next(n for n, text in enumerate(code.splitlines(), start=1) if place in text)
    assert [part for part in ("put_", "Odd", f"{recipe}:{line}") if part not in told] == []


class Buffers(nn.Module):
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
        found.append(torch.cat(buffers.take_changes(part)))
    buffers.settle(sum(found[1:], start=found[0]), len(moves))


def test_buffers_move_by_the_mean_counts_are_of_rank_0_and_a_late_one_is_refused():
    module = Buffers()
    buffers = StepBuffers(module, torch.float32)
    for _ in range(2):
        step_of(module, buffers, [0.5, 1.5, 4.0])
    assert module.mean.tolist() == [5.0, 6.0]
    assert module.count.item() == 2**60 + 3
    assert module.mask.tolist() == [float("-inf"), 0.0]
    module = Buffers()
    buffers = StepBuffers(module, torch.float32)
    step_of(module, buffers, [1.0, 1.0])
    with pytest.raises(UserError, match="late"):
        step_of(module, buffers, [1.0, 1.0], late=True)


@st.composite
def divisions(draw) -> tuple[int, int, int]:
    """Draw virtual ranks, ranks, and how many of the virtual ranks have samples."""
    parts = draw(st.integers(1, 64))
    return parts, draw(st.integers(1, parts)), draw(st.integers(1, parts))


def worlds(parts: int, ranks: int) -> list[World]:
    return [World(rank=r, world_size=ranks, virtual_ranks=parts) for r in range(ranks)]


def held_roots(values, world, present):
    tree = TreeSum(lambda left, right: left + right)
    for part in held_parts(world):
        if part < present:
            tree.push(values[part], part)
    return tree.roots


@settings(max_examples=50, deadline=None)
@given(divisions(), st.integers(0, 2**32))
def test_the_sum_has_the_same_bits_on_any_number_of_ranks(division, seed):
    parts, ranks, present = division
    generator = torch.Generator().manual_seed(seed)
    values = list(torch.randn(parts, 3, generator=generator) * 10 ** torch.rand(parts, 1) ** 9)
    across = TreeSum(lambda left, right: left + right)
    for world in worlds(parts, ranks):
        for level, number, value in held_roots(values, world, present):
            across.push(value, number, level)
    assert torch.equal(across.total(), add_up(values[:present], lambda a, b: a + b))


def by_definition(values, low, size):
    """Add up [low, low + size), size a power of two; what lies beyond the end is absent."""
    if size == 1:
        return values[low]
    half = size // 2
    left = by_definition(values, low, half)
    if low + half >= len(values):
        return left
    return left + by_definition(values, low + half, half)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=64))
def test_the_tree_is_the_one_of_its_definition(values):
    size = 1 << (len(values) - 1).bit_length()
    assert add_up(values, lambda a, b: a + b) == by_definition(values, 0, size)


@settings(max_examples=50, deadline=None)
@given(divisions())
def test_a_rank_holds_few_partial_sums_at_a_time(division):
    parts, ranks, _ = division
    for world in worlds(parts, ranks):
        held, tree, most = held_parts(world), TreeSum(lambda _a, _b: None), 0
        for part in held:
            most = max(most, len(tree.roots) + 1)
            tree.push(None, part)
        assert [root[:2] for root in tree.roots] == [root[:2] for root in roots_over(held)]
        if parts % ranks == 0 and (parts // ranks).bit_count() == 1:
            assert len(tree.roots) == 1
            assert most <= math.log2(parts / ranks) + 1
        assert most <= max(1, 2 * math.log2(parts))


@settings(max_examples=50, deadline=None)
@given(divisions(), st.integers(0, 500))
def test_the_shares_of_ranks_are_those_of_their_virtual_ranks(division, samples):
    parts, ranks, _ = division
    positions = range(100, 100 + samples)
    found = [
        position
        for world in worlds(parts, ranks)
        for part in held_parts(world)
        for position in part_of(positions, part, world)
    ]
    assert found == list(positions)


CASES = ((5, 5), (5, 2), (4, 4))  # virtual ranks, and how many of them have samples


def reduced() -> list[list[torch.Tensor]]:
    """Add up tensors of odd shapes, layouts and types over ranks; runs on each of them."""
    from samestep.launch.ranks.world import find_world, join, leave

    world = find_world("cpu")
    join(world)
    kept = []
    for most in (tree._SMALL_BYTES, 0):  # exchanged once, and twice
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tree, "_SMALL_BYTES", most)
            kept += [
                _reduced(replace(world, virtual_ranks=parts), present) for parts, present in CASES
            ]
    leave(world)
    return kept


def _reduced(world: World, present: int) -> list[torch.Tensor]:
    like = [
        torch.empty(3, 5),
        torch.empty(0),
        torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.empty(700_000),
        torch.empty(7, dtype=torch.float64),
        torch.empty((), dtype=torch.bfloat16),
    ]
    tree = TreeSum(lambda left, right: [a + b for a, b in zip(left, right, strict=True)])
    for part in held_parts(world):
        if part < present:
            generator = torch.Generator().manual_seed(part)
            drawn = [torch.randn(t.shape, generator=generator) * 10**part for t in like]
            tree.push(
                [torch.empty_like(t).copy_(d) for t, d in zip(like, drawn, strict=True)], part
            )
    sums = TreeReduce(world, [t.to("meta") for t in like], 1)(tree.roots, present)
    assert [t.stride() for t in sums] == [t.stride() for t in like]
    return [t.clone() for t in sums]


def test_tensors_of_all_kinds_add_up_to_the_same_bits_across_processes(tmp_path):
    alone = reduced()
    for found in run_ranks(reduced, 3, tmp_path):
        for sums, must in zip(found, alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(sums, must, strict=True))
