"""Whole steps are those of the eager loop, also replayed; nothing is compiled here.

`test_compiled.py` compiles them.
"""

import copy

import pytest
import torch
from torch import nn

from samestep import Settings
from samestep.data.blocks import Block
from samestep.ranks.world import World
from samestep.training import whole_step
from samestep.training.compiled import WholeStep
from samestep.training.cuda_graph import Replayed
from samestep.training.optimizer import make_optimizer
from samestep.training.phases import Phases
from samestep.training.plan import make_plan
from samestep.training.step import EagerStep, Trainee
from tests.captures import Captures

BATCH, IN_A_GRAPH = 6, 4


def model(*, large: bool) -> nn.Module:
    """Return a network with buffers and a frozen layer; `large`: one with a convolution."""
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)]
    if large:
        layers = [nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten(), *layers]
    layers[-4].requires_grad_(False)
    return nn.Sequential(*layers).double()


def trainee(net: nn.Module, settings: Settings) -> Trainee:
    optimizer = make_optimizer(net.parameters(), settings, settings.lr, torch.device("cpu"))
    return Trainee(
        model=net, wrapped=net, optimizer=optimizer, scaler=None, loss=nn.functional.cross_entropy
    )


def blocks(settings: Settings, large: bool) -> list[Block]:
    """Return three groups of steps, two single ones, an incomplete batch, and a group again."""
    torch.manual_seed(5)
    made, first = [], 0
    rows = BATCH * (settings.accumulate or 1)
    together = 1 if large else IN_A_GRAPH
    shapes = [(together, rows)] * 3 + [(1, rows)] * 2 + [(1, rows - 2), (together, rows)]
    for steps, size in shapes:
        x = torch.randn(steps * size, 8, dtype=torch.float64)
        made.append(Block(first, steps, x, (x[:, 0] > 0).long(), size, 1.0, size))
        first += steps
    return made


def rate(step: int) -> float:
    return 0.05 / (1 + step)


@pytest.fixture
def captures(monkeypatch):
    """Let whole steps run as they are, and be captured by a stand-in."""
    stand_in = Captures()
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    monkeypatch.setattr(whole_step, "replayed_on", lambda _, take: Replayed(take, stand_in))
    return stand_in


def make_whole(trained: Trainee, settings: Settings) -> WholeStep:
    plan = make_plan(settings, 600, 1, resumed=False)
    return WholeStep(trained, settings, World(), plan, IN_A_GRAPH, Phases())


def run(step: EagerStep, some: list[Block], start: int = 0):
    """Take the steps of blocks; return their losses, norms and notes."""
    losses, norms, notes = [], [], []
    for block in some:
        pieces = [block] if step.steps_per_call == block.num_steps else list(block.singles())
        for piece in pieces:
            lrs = [rate(start + number) for number in range(piece.num_steps)]
            result = step(piece, start, lrs, want_norm=True)
            start += piece.num_steps
            losses += list(result.losses)
            norms += list(result.grad_norms)
            notes += result.notes
    return torch.stack(losses), torch.stack(norms), notes


def same(ours: Trainee, its: Trainee):
    for name, value in its.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], value, rtol=1e-12, atol=1e-12)
    mine, other = ours.optimizer.state_dict()["state"], its.optimizer.state_dict()["state"]
    assert mine.keys() == other.keys()
    for number, state in other.items():
        for key, value in state.items():
            if value is not None:
                torch.testing.assert_close(mine[number][key], value, rtol=1e-12, atol=1e-12)


CASES = {
    "adam": {"weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.2, "clip_norm": 0.3},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "accumulate": 2},
    "plain sgd": {"optimizer": "sgd"},
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_whole_steps_and_replayed_ones_take_the_eager_trajectory(captures, name, large):
    """Small weights are packed, large ones stay as they are; single steps run eagerly between."""
    settings = Settings(batch_size=BATCH, epochs=9, precision="fp64", compile="on", **CASES[name])
    net = model(large=large)
    ours, its = (trainee(copy.deepcopy(net), settings) for _ in range(2))
    data = blocks(settings, large)
    losses, norms, notes = run(make_whole(ours, settings), data)
    expected, expected_norms, _ = run(EagerStep(its, settings, World(), BATCH), data)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-12, atol=1e-12)
    same(ours, its)
    (note,) = notes
    assert note["steps_per_graph"] == (1 if large else IN_A_GRAPH)
    assert "CUDA graph" in note["what"]
    assert captures.captured == 1
    assert captures.replayed == (5 if large else 3)


def test_a_run_that_goes_on_counts_the_steps_of_the_attempt_before(captures):
    """Adam's first steps are corrected for its short memory; its count is a tensor of its own."""
    settings = Settings(batch_size=BATCH, epochs=9, precision="fp64", compile="on")
    net = model(large=False)
    ours, its = (trainee(copy.deepcopy(net), settings) for _ in range(2))
    before, after = blocks(settings, large=False)[:2], blocks(settings, large=False)[2:]
    taken = sum(block.num_steps for block in before)
    run(EagerStep(ours, settings, World(), BATCH), before)
    run(make_whole(ours, settings), after, taken)
    run(EagerStep(its, settings, World(), BATCH), [*before, *after])
    same(ours, its)
    assert captures.replayed == 1


def test_an_optimizer_that_begins_anew_within_a_run_counts_from_its_own_beginning(captures):
    settings = Settings(batch_size=BATCH, epochs=9, precision="fp64", compile="on")
    net = model(large=False)
    ours, its = (trainee(copy.deepcopy(net), settings) for _ in range(2))
    data = blocks(settings, large=False)
    run(make_whole(ours, settings), data, 1000)
    run(EagerStep(its, settings, World(), BATCH), data, 1000)
    same(ours, its)
    assert captures.captured == 1


def test_a_replayed_call_reads_nothing_back_from_the_device(captures, monkeypatch):
    """Each read would make the host wait for all that the device still has to do."""
    settings = Settings(batch_size=BATCH, epochs=9, precision="fp64", compile="on", clip_norm=1.0)
    step = make_whole(trainee(model(large=False), settings), settings)
    first, *later = blocks(settings, large=False)[:3]
    run(step, [first])

    def read(*_arguments):
        raise AssertionError("the host waits for the device")

    for name in ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, read)
    run(step, later, 4)
    monkeypatch.undo()
    assert captures.replayed == 2


def test_where_capturing_fails_the_note_says_so_and_the_steps_are_the_same(captures, monkeypatch):
    def fails(_function):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(whole_step, "replayed_on", lambda _, take: Replayed(take, fails))
    settings = Settings(batch_size=BATCH, epochs=9, precision="fp64", compile="on")
    net = model(large=False)
    ours, its = (trainee(copy.deepcopy(net), settings) for _ in range(2))
    data = blocks(settings, large=False)
    _, _, (note,) = run(make_whole(ours, settings), data)
    run(EagerStep(its, settings, World(), BATCH), data)
    same(ours, its)
    assert "operation not permitted" in note["what"]
    assert captures.captured == 0
