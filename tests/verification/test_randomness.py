"""What a model draws is seen, and can be held still."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from samestep.core.training.side_effects import KINDS, RandomDraws, differs_by_ranks, watched
from samestep.prove.verification.recipe_under_test import hold_model

ALL = frozenset(KINDS)
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "rand": lambda x: x * torch.rand(len(x), 1),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "normal_": lambda x: x + x.clone().normal_(),
    "randint": lambda x: x * torch.randint(3, 1 << 40, (1,)),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel": functional.gumbel_softmax,
    "attention": lambda x: functional.scaled_dot_product_attention(
        x[None], x[None], x[None], dropout_p=0.5
    ),
    "distribution": lambda x: x + torch.distributions.Normal(0.0, x.abs() + 1).rsample(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_torch_are_seen_with_their_line_and_held_still(name):
    seen = RandomDraws()
    free = watched(DRAWS[name], seen)
    assert not torch.equal(free(X), free(X))
    assert any(line.startswith("test_randomness.py:") for line in seen.draws.values())
    still = watched(DRAWS[name], RandomDraws(), ALL)
    assert torch.equal(still(X), still(X))
    if name != "attention":  # which mixes the samples of a batch
        assert torch.equal(still(X)[:2], still(X[:2])), "the same in any batch"


def test_what_draws_nothing_is_not_seen_and_modules_with_dropout_are_held_still():
    seen = RandomDraws()
    for function in (
        lambda: functional.dropout(X, 0.0),
        lambda: functional.dropout(X, 0.5, training=False),
        lambda: functional.rrelu(X),
        lambda: functional.scaled_dot_product_attention(X[None], X[None], X[None]),
        lambda: functional.linear(X, X),
    ):
        watched(function, seen)()
    assert not seen.draws
    assert not seen.generators
    norm, drops = nn.BatchNorm1d(4), nn.LSTM(4, 4, 2, dropout=0.5)
    assert differs_by_ranks(nn.Sequential(norm, nn.Dropout(0.0), nn.LSTM(4, 4))) == ["BatchNorm"]
    assert differs_by_ranks(nn.ModuleList([nn.SyncBatchNorm(4), drops])) == ["dropout"]
    model = nn.ModuleList([nn.LSTM(4, 4, 2, dropout=0.5), nn.MultiheadAttention(4, 2, dropout=0.5)])
    hold_model(model, RandomDraws(), ALL)
    lstm, attention = model
    assert torch.equal(lstm(X)[0], lstm(X)[0])
    assert torch.equal(attention(X, X, X)[0], attention(X, X, X)[0])


@pytest.mark.parametrize(
    ("name", "draw"),
    [("Python's random", random.random), ("NumPy's random", lambda: np.random.rand(2))],  # noqa: NPY002
)
def test_draws_from_python_and_numpy_are_seen_and_held_without_moving_their_generators(name, draw):
    seen = RandomDraws()
    watched(draw, seen)()
    assert list(seen.generators) == [name]
    before = random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    still = watched(draw, RandomDraws(), ALL)
    assert np.array_equal(still(), still())
    assert (random.getstate(), np.random.get_state()[2]) == before  # noqa: NPY002


@pytest.mark.parametrize("tracks", [True, False])
def test_held_batch_norm_gives_a_sample_the_same_in_any_batch(tracks):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=tracks))
    part = model.train()(X)[:2]
    assert not torch.allclose(part, model(X[:2]))
    hold_model(model, RandomDraws(), ALL, lambda: model(X))
    model.train()
    model[1].train(mode=True)  # as a model may have it
    assert torch.allclose(model(X)[:2], model(X[:2]), atol=1e-6)
    before = [buffer.clone() for buffer in model.buffers()]
    model(X)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
