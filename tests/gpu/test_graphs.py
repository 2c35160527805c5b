"""Whole steps on a GPU: compiled, replayed as a CUDA graph, and the same as the eager ones."""

import copy

import pytest
import torch
from torch import nn

from samestep.core.data.source import Batch
from samestep.core.learner.optimizer_state import load_state
from samestep.core.training import step_graph
from samestep.core.training.compiled import FullBatches
from samestep.core.training.evaluation import evaluate
from samestep.core.training.step_graph import Replayed
from samestep.launch.ranks.world import World
from tests import steps_by_hand as by_hand
from tests.gpu.trainings import no_synchronisation
from tests.steps_by_hand import IN_A_GRAPH, OPTIMIZERS, blocks, model, run, settings_of, whole

# The compiler warns of what it would rather have: TF32, say.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def _forget_graphs():
    yield
    torch._dynamo.reset()


def several(number, settings, device, **kind):
    net = model(**kind)
    return [by_hand.learner(copy.deepcopy(net), settings, device) for _ in range(number)]


def is_replayed(notes):
    (note,) = notes
    return "replayed as a CUDA graph" in note["what"]


@pytest.mark.parametrize(
    ("name", "large"),
    [
        *((name, False) for name in OPTIMIZERS if name != "adamw"),
        pytest.param("adamw", False, marks=pytest.mark.gpu(dry=True)),
        ("adamw", True),
        ("sgd", True),
    ],
)
def test_replayed_steps_take_the_eager_trajectory(cuda, name, large):
    settings = settings_of(**OPTIMIZERS[name])
    ours, its = several(2, settings, cuda, large=large)
    data = blocks(settings, cuda, together=1 if large else IN_A_GRAPH) * 2
    ran = run(whole(ours, settings, cuda), data)
    expected = run(by_hand.eager(its, settings, cuda), data)
    torch.testing.assert_close(ran.losses, expected.losses, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(ran.norms, expected.norms, rtol=TOLERANCE, atol=TOLERANCE)
    by_hand.assert_same(ours, its, TOLERANCE)
    assert is_replayed(ran.notes) == (cuda.type == "cuda")


def test_weights_in_channels_last_stay_so_and_take_the_eager_trajectory(cuda):
    settings = settings_of(**OPTIMIZERS["sgd"])
    net = model(large=True).to(cuda)
    net[1].to(memory_format=torch.channels_last)
    ours, its = (by_hand.learner(copy.deepcopy(net), settings, cuda) for _ in range(2))
    data = blocks(settings, cuda, together=1)
    ran = run(whole(ours, settings, cuda), data)
    run(by_hand.eager(its, settings, cuda), data)
    by_hand.assert_same(ours, its, TOLERANCE)
    assert is_replayed(ran.notes)
    assert ours.model[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_replayed_step_draws_what_it_draws_uncaptured(cuda, monkeypatch):
    settings = settings_of()
    ours, its = several(2, settings, cuda, dropout=0.5)
    data = blocks(settings, cuda, together=IN_A_GRAPH)[:1] * 3
    step = whole(ours, settings, cuda)
    first = run(step, data, lr=0.0)  # the rate is 0: the losses differ by what is drawn alone
    again = run(step, data, lr=0.0)
    monkeypatch.setattr(step_graph, "replayed_on", lambda *_: None)
    uncaptured = run(whole(its, settings, cuda), data, lr=0.0)
    assert is_replayed(first.notes)
    assert not is_replayed(uncaptured.notes)
    assert torch.equal(first.losses, again.losses)
    assert torch.equal(first.losses, uncaptured.losses)
    one, two, three = first.losses.view(3, IN_A_GRAPH)
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)


def test_a_replayed_call_does_not_synchronise(cuda):
    settings = settings_of(clip_norm=0.3)
    (ours,) = several(1, settings, cuda, dropout=0.1)
    step = whole(ours, settings, cuda)
    data = blocks(settings, cuda, together=IN_A_GRAPH)[:3]
    run(step, data[:1])
    with no_synchronisation():
        run(step, data[1:], start=IN_A_GRAPH)


def test_losses_of_earlier_calls_are_kept(cuda):
    settings = settings_of()
    (ours,) = several(1, settings, cuda)
    step = whole(ours, settings, cuda)
    kept, read = [], []
    for number, block in enumerate(blocks(settings, cuda, together=IN_A_GRAPH)[:3]):
        ran = run(step, [block], start=number * IN_A_GRAPH)
        kept.append(ran.losses)
        read.append(ran.losses.tolist())
    assert [losses.tolist() for losses in kept] == read


@pytest.mark.gpu(dry=True)
def test_a_run_that_goes_on_takes_the_same_steps_and_its_new_state_is_captured_anew(cuda):
    settings = settings_of(**OPTIMIZERS["adamw"])
    through, stopped, resumed = several(3, settings, cuda)
    data = blocks(settings, cuda, together=IN_A_GRAPH)
    run(whole(through, settings, cuda), data)
    half = whole(stopped, settings, cuda)
    run(half, data[:2])
    weights = copy.deepcopy(stopped.model.state_dict())
    state = copy.deepcopy(stopped.optimizer.state_dict())

    resumed.model.load_state_dict(weights)
    load_state(resumed.optimizer, copy.deepcopy(state))
    run(whole(resumed, settings, cuda), data[2:], start=2 * IN_A_GRAPH)
    by_hand.assert_same(resumed, through, TOLERANCE)

    run(half, data[2:3], start=2 * IN_A_GRAPH)
    stopped.model.load_state_dict(weights)
    load_state(stopped.optimizer, copy.deepcopy(state))  # the state lies elsewhere now
    run(half, data[2:], start=2 * IN_A_GRAPH)
    by_hand.assert_same(stopped, through, TOLERANCE)


def test_a_capture_that_fails_leaves_the_device_usable(cuda):
    """A function that waits for the device breaks its capture; it runs as it is from then on."""

    def waits(kept, fed):
        ((total,),) = kept
        total += nn.functional.dropout(fed, 0.0)
        large = torch.rand(1 << 24, device=cuda)
        return total * (1 if large.sum().item() else 0)

    def fine(kept, fed):
        ((total,),) = kept
        total += fed
        return nn.functional.dropout(total, 0.5)

    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    stream, broken = torch.cuda.current_stream(), Replayed(waits)
    kept, one = [[torch.zeros(3, device=cuda)]], torch.ones(3, device=cuda)
    for expected in (1.0, 2.0, 3.0):
        assert broken(kept, one).tolist() == [expected] * 3
    assert broken.why_not
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()

    works, kept = Replayed(fine), [[torch.zeros(1000, device=cuda)]]
    drawn = []
    for _ in range(3):
        torch.manual_seed(1)
        drawn.append(works(kept, torch.ones(1000, device=cuda)) != 0)
    assert not works.why_not
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[1], drawn[2])
    assert kept[0][0].tolist() == [3.0] * 1000

    del works, broken
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + (16 << 20)  # the 64 MiB are given back


def test_a_compiled_evaluation_gives_the_same_means(cuda):
    net = model(large=True, dropout=0.5).to(cuda)
    x = torch.randn(20, 8, dtype=torch.float64, device=cuda)
    parts = [(start, x[start : start + 8]) for start in (0, 8, 16)]
    batches = [Batch(part, (part[:, 0] > 0).long(), len(part), first) for first, part in parts]

    class Batches:
        def evaluation(self, _batch_size):
            return iter(batches)

    def means(forward):
        world = World(device=cuda)
        loss = nn.functional.cross_entropy
        how = {"world": world, "batch_size": 8, "precision": "fp64", "seed": 1}
        return evaluate(net, Batches(), loss, {}, **how, forward=forward)

    compiled, plain = means(FullBatches(net, 8)), means(None)
    assert compiled == pytest.approx(plain, rel=TOLERANCE)
