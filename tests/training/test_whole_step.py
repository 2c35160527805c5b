"""Whole steps are those of the eager loop, also replayed; nothing is compiled here."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import samestep
from samestep.core.training import compiled as whole_steps
from samestep.core.training import step_graph
from samestep.core.training.step_graph import Replayed
from tests import steps_by_hand as by_hand
from tests.captures import Captures
from tests.steps_by_hand import IN_A_GRAPH, assert_same, blocks, eager, run, settings_of, whole


@pytest.fixture
def captures(monkeypatch):
    """Let whole steps run as they are, and be captured by a stand-in."""
    stand_in = Captures()
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    monkeypatch.setattr(step_graph, "replayed_on", lambda _, take: Replayed(take, stand_in))
    return stand_in


def two(settings, *, large=False):
    net = by_hand.model(large=large)
    return [by_hand.learner(copy.deepcopy(net), settings) for _ in range(2)]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", by_hand.OPTIMIZERS)
def test_whole_steps_and_replayed_ones_take_the_eager_trajectory(captures, name, large):
    settings = settings_of(**by_hand.OPTIMIZERS[name])
    ours, its = two(settings, large=large)
    together = 1 if large else IN_A_GRAPH
    data = blocks(settings, together=together)
    ran, expected = run(whole(ours, settings), data), run(eager(its, settings), data)
    torch.testing.assert_close(ran.losses, expected.losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ran.norms, expected.norms, rtol=1e-12, atol=1e-12)
    assert_same(ours, its)
    (note,) = ran.notes
    assert note["steps_per_graph"] == together
    assert "CUDA graph" in note["what"]
    assert captures.captured == 1
    assert captures.replayed == (5 if large else 3)


@pytest.mark.parametrize(("before", "start"), [(2, 0), (0, 1000)])
def test_an_optimizer_counts_its_own_steps_whichever_came_before(captures, before, start):
    settings = settings_of()
    ours, its = two(settings)
    data = blocks(settings, together=IN_A_GRAPH)
    if before:
        run(eager(ours, settings), data[:before], start=start)
    run(whole(ours, settings), data[before:], start=start + before * IN_A_GRAPH)
    run(eager(its, settings), data, start=start)
    assert_same(ours, its)
    assert captures.captured == 1


def test_what_a_schedule_tells_the_loss_counts_from_that_step_on(monkeypatch, here):
    """A schedule runs before every call, and is a common place to turn a loss over."""
    monkeypatch.setattr(whole_steps, "_STEPS_PER_GRAPH", 2)
    compiled = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled(f, fullgraph=True, dynamic=False))
    late, ends = [False], []

    def schedule(step, _total):
        late[0] = step >= 8
        return 1.0

    def loss(outputs, targets):
        return (outputs - targets).abs().mean() if late[0] else (outputs - targets).square().mean()

    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    recipe = samestep.Recipe(
        model=lambda: nn.Linear(4, 1),
        data=lambda: samestep.Splits(train=(x, x.sum(1, keepdim=True))),
        loss=loss,
        metrics={},
        schedule=schedule,
        settings={"batch_size": 4, "lr": 0.01, "epochs": 1, "precision": "fp64"},
    )
    for how in ("off", "on"):
        run = samestep.train(recipe, compile=how, device="cpu", quiet=True, run_dir=here / how)
        ends.append(samestep.load(run).weight)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)
    assert any(record["event"] == "compile" for record in samestep.read_records(here / "on"))


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets)


def test_what_draws_is_compiled_alone_and_a_replay_reads_nothing_back(captures, monkeypatch):
    """The compiler may use what is drawn before it is drawn."""
    settings, net = settings_of(), by_hand.model(dropout=0.5)
    net[3] = nn.AlphaDropout(0.5)
    step = whole(by_hand.learner(net, settings), settings)
    ran = run(step, blocks(settings, together=IN_A_GRAPH)[:1] * 2, lr=0.0)
    (note,) = ran.notes
    assert note["steps_per_graph"] == 0
    assert "random" in note["what"]
    assert len(set(ran.losses.tolist())) == 2 * IN_A_GRAPH
    assert captures.captured == 0
    settings = settings_of()
    counting = replace(by_hand.learner(by_hand.model(), settings), loss=Counting())
    (note,) = run(whole(counting, settings), blocks(settings, together=IN_A_GRAPH)[:2]).notes
    assert note["steps_per_graph"] == 0
    assert "calls" in note["what"]
    settings = settings_of(clip_norm=1.0)
    step = whole(two(settings)[0], settings)
    first, *later = blocks(settings, together=IN_A_GRAPH)[:3]
    run(step, [first])

    def read(*_arguments):
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patched:
        for name in ("item", "tolist", "cpu", "numpy"):
            patched.setattr(torch.Tensor, name, read)
        for name in ("__int__", "__float__", "__bool__", "__index__"):
            patched.setattr(torch.Tensor, name, read)
        run(step, later, start=IN_A_GRAPH)
    assert captures.replayed == 2


class Scaled(nn.Module):  # a network that scales its outputs by a number, and means over positions
    def __init__(self):
        super().__init__()
        self.scale, self.linear = 1.0, nn.Linear(8, 2).double()

    def forward(self, x):
        return self.linear(x.view(len(x), -1, 8).mean(1)) * self.scale


@pytest.mark.parametrize("later", ["the next epoch", "after an evaluation", "after a lone step"])
def test_what_the_model_has_become_since_the_last_graph_counts(monkeypatch, later):
    """Within an epoch the compiler's guards look at the samples alone."""
    compiled = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled(f, fullgraph=True, dynamic=False))
    evaluated = later == "after an evaluation"
    settings = settings_of(eval_every_steps=3 * IN_A_GRAPH if evaluated else None)
    nets = [copy.deepcopy(Scaled()) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours, its = (replace(by_hand.learner(net, settings), alone=True) for net in nets)
    takes = whole(ours, settings), eager(its, settings)
    data, start = blocks(settings, together=IN_A_GRAPH), 0
    longer = replace(data[1], inputs=data[1].inputs.repeat(1, 2))
    first, last = [data[0], longer, data[1]], data[2]
    if later == "the next epoch":
        last = replace(last, first_step=0)
    ran = [run(take, first) for take in takes]
    start += 3 * IN_A_GRAPH
    if later == "after a lone step":
        [run(take, [data[3]], start=start) for take in takes]
        start += 1
    for net in nets:
        net.scale = 3.0
    ran += [run(take, [last], start=start) for take in takes]
    for mine, other in zip(ran[::2], ran[1::2], strict=True):
        torch.testing.assert_close(mine.losses, other.losses, rtol=1e-12, atol=1e-12)
    assert_same(ours, its)


def test_where_capturing_fails_the_note_says_so_and_the_steps_are_the_same(captures, monkeypatch):
    def fails(_function):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(step_graph, "replayed_on", lambda _, take: Replayed(take, fails))
    settings = settings_of()
    ours, its = two(settings)
    data = blocks(settings, together=IN_A_GRAPH)
    (note,) = run(whole(ours, settings), data).notes
    run(eager(its, settings), data)
    assert_same(ours, its)
    assert "operation not permitted" in note["what"]
    assert captures.captured == 0
