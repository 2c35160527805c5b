"""What a step draws at random depends on the seed, the step and the rank, and on nothing else."""

import pytest
import torch
from torch import nn

from samestep import Settings, UserError
from samestep.core.data.keyed_random import seed_torch
from samestep.core.data.order import Block, share
from samestep.core.learner.optimizer import make_optimizer
from samestep.core.training.step import EagerStep
from samestep.core.training.work import Learner
from samestep.launch.ranks.world import World


def learner_of(model, optimizer=None, loss=lambda outputs, _: outputs.mean()):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return Learner(
        model=model, applied=model, wrapped=model, optimizer=optimizer, scaler=None, loss=loss
    )


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.drawn = []

    def forward(self, inputs):
        self.drawn.append(float(torch.rand(())))
        return inputs * self.weight


def steps_of(rank=0, seed=1, batch_size=4, **told):
    """Return a model, and a function that takes its n-th step."""
    settings, model = Settings(optimizer="sgd", seed=seed, **told), Drawing()
    optimizer = make_optimizer(model.parameters(), settings, 0.5, torch.device("cpu"))
    learner = learner_of(model, optimizer, lambda o, t: (o - t).square().mean())
    step = EagerStep(learner, settings, World(rank=rank), batch_size)
    block = Block(0, 1, torch.arange(4.0), torch.zeros(4), 4, 1.0, 4)
    return model, lambda number: step(block, number, [0.5], want_norm=True)


def drawn_at(number, **how):
    model, take = steps_of(**how)
    take(number)
    return model.drawn


def test_every_step_draws_its_own_and_seeds_its_device_and_the_cpu(monkeypatch):
    drawn = {
        drawn_at(number, rank=rank, seed=seed)[0]
        for number in range(10)
        for rank in range(4)
        for seed in range(3)
    }
    assert len(drawn) == 120
    torch.manual_seed(1)
    first = drawn_at(7)
    torch.manual_seed(2)
    torch.rand(100)
    assert drawn_at(7) == first
    assert len(set(drawn_at(0, batch_size=1))) == 4
    generators = [Generators(), Generators()]
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    seed_torch(17, torch.device("cuda", 1))
    assert [one.seeds for one in generators] == [[], [17]]
    assert torch.initial_seed() == 17
    torch.manual_seed(18)
    drawn = torch.rand(3)
    seed_torch(18, torch.device("cpu"))
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("batch_size", [4, 3, 2, 1])
def test_a_step_of_any_micro_steps_is_gradient_descent_on_the_mean(batch_size):
    """Loss w² mean(x²) = 3.5 w²: gradient 7 at w = 1, so the step of 0.5 leads to -2.5."""
    model, take = steps_of(batch_size=batch_size)
    result = take(0)
    assert float(result.losses[0]) == pytest.approx(3.5)
    assert float(result.grad_norms[0]) == pytest.approx(7)
    assert model.weight.item() == pytest.approx(-2.5)


@pytest.mark.parametrize(("rows", "batch_size"), [(33, 16), (5, 1), (7, 2), (64, 16)])
def test_ranks_that_talk_in_forward_take_equally_many_micro_steps(rows, batch_size):
    """With SyncBatchNorm a rank with fewer forwards than another would let that one wait."""
    calls, total = set(), 0.0
    for rank in range(2):
        model, world = Drawing(), World(rank=rank, world_size=2)
        step = EagerStep(learner_of(model), Settings(sync_batchnorm=True), world, batch_size)
        step._objective.agreed = True  # nobody is there to agree with
        mine = share(range(rows), rank, 2)
        inputs = torch.arange(float(rows))[mine.start : mine.stop]
        step._backward(Block(0, 1, inputs, torch.zeros(len(mine)), len(mine), 1.0, rows))
        calls.add(len(model.drawn))
        total += float(model.weight.grad) / 2  # as DDP averages it
    assert len(calls) == 1
    assert total == pytest.approx((rows - 1) / 2)


def test_a_batch_without_rows_is_not_cut_and_clipping_never_scales_up():
    model, _ = steps_of()
    step = EagerStep(learner_of(model), Settings(), World(), 2)
    graphs = Block(0, 1, torch.arange(9.0), torch.zeros(4), 4, 1.0, 4)  # 9 nodes of 4 graphs
    with pytest.raises(UserError, match=r"4 samples holds \(9,\) float32.*--accumulate"):
        step(graphs, 0, [0.5], want_norm=False)
    model, take = steps_of(clip_norm=2.0)
    assert float(take(0).grad_norms[0]) == pytest.approx(7)
    assert model.weight.item() == pytest.approx(0, abs=1e-6)
    model, take = steps_of(clip_norm=100.0)
    take(0)
    assert model.weight.item() == pytest.approx(-2.5)


@pytest.mark.parametrize("most", [None, 1.0])
def test_sparse_gradients_have_the_norm_of_dense_ones_and_are_clipped_alike(most):
    norms = []
    for sparse in (False, True):
        words = torch.nn.Embedding(5, 3, sparse=sparse)
        torch.nn.init.constant_(words.weight, 0.5)
        words(torch.tensor([1, 1, 4])).square().sum().backward()
        step = EagerStep(learner_of(words), Settings(clip_norm=most), World(), 4)
        norms.append((float(step._clip()), words.weight.grad.to_dense()))
    assert norms[0][0] == pytest.approx(norms[1][0])
    torch.testing.assert_close(norms[0][1], norms[1][1])


class Generators:  # stand in for the generators of several GPUs
    def __init__(self):
        self.seeds = []

    def manual_seed(self, seed):
        self.seeds.append(seed)
