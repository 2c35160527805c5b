"""What is planted in a recipe is found by the experiments of one process, and nothing else is."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from samestep.base.errors import UserError
from samestep.core.learner.side_effects import KINDS, RandomDraws, differs_by_ranks, watched
from samestep.prove.verification import causes
from samestep.prove.verification.recipe_under_test import exact_precision, hold_model
from samestep.prove.verification.rows import (
    data,
    loss,
    metrics,
    model,
    run_experiments,
    state,
    trainings,
)
from samestep.prove.verification.rows.state import find_hidden
from tests.verification import planted
from tests.verification.made_up import different, recipe_under_test, undisturbed, with_facts

# What is planted → (the kinds of draws, the rows that differ whatever the ranks do).
OUTSIDE = {"state": causes.OUTSIDE_MODULE.name}
UNKEYED = {"augmentation": causes.UNKEYED["augment"].name}
NOT_A_MEAN = {"loss": causes.NOT_A_MEAN.name}
NOTHING = ("LOSS_SUM_SAID", "LOSS_OF_TERMS", "CACHED", "FLOATS", "SPARSE", "SPECTRAL", "")
NOTHING += ("COLLATE_BY_SAMPLE", "EXTRA_STATE", "DRAWN_IN_FORWARD")
AUGMENTED = ("AUGMENT", "AUGMENT_WHOLE_BATCH", "TRANSFORM", "DATASET")
FOUND = {
    **dict.fromkeys(NOTHING, (set(), {})),
    "BATCHNORM": ({"batchnorm"}, {}),
    **dict.fromkeys(("DROPOUT", "FUNCTIONAL"), ({"dropout"}, {})),
    **dict.fromkeys(AUGMENTED, (set(), UNKEYED)),
    **dict.fromkeys(("LOSS_SUM", "LOSS_WEIGHTED", "LOSS_IN_FORWARD"), (set(), NOT_A_MEAN)),
    "MEAN_SAID_TO_BE_A_SUM": (set(), {"loss": causes.A_MEAN.name}),
    "OTHER_TERMS": (set(), {"loss": causes.OF_TERMS.name}),
    "LAST_BENT": (set(), {"last batch": causes.UNEVEN_BATCH.name}),
    "CONTRAST": (set(), {"loss": causes.OF_BATCH.name}),
    "PADDED": (set(), {"loss": causes.PADDED.name, "samples apart": causes.MIXED.name}),
    **dict.fromkeys(("BANK", "CARRIED", "NUMPY_GENERATOR", "COUNTER"), (set(), OUTSIDE)),
    "CLOCK": (set(), {"state": causes.CLOCK.name}),
    "F1": (set(), {"metrics": causes.OVER_RANKS.name}),
    "WHITENING": (set(), {"samples apart": causes.MIXED.name}),
    "EMA": (set(), {"samples apart": causes.BUFFERS.name}),
    "STATE_IN_LOSS": (set(), {"state": causes.IN_LOSS.name}),
    "UNUSED": (set(), {"parameters": causes.UNUSED.name}),
    "PYTHONS_RANDOM": ({"state"}, {}),
    "OWN_GENERATOR": ({"dropout"}, OUTSIDE),
    "COLLATE_DRAWS": (set(), {"augmentation": causes.COLLATE_DRAWS.name}),
    "PACKED": (set(), {"samples apart": causes.MIXED.name}),
    "ACT_NORM": (set(), {"samples apart": causes.WRITTEN.name}),
}


def _sums(found):
    return found.full > 1e-3, found.cause == causes.A_SUM


def _reader(found):
    return found.part, found.batchwise


APART = model.SAMPLES_APART.name
# What is planted → a row that tells more, what of it is looked at, and what that has to be.
TOLD = {
    "AUGMENT": (data.AUGMENTATION.name, _reader, ("augment", False)),
    "AUGMENT_WHOLE_BATCH": (data.AUGMENTATION.name, _reader, ("augment", True)),
    "TRANSFORM": (data.AUGMENTATION.name, _reader, ("transform", False)),
    "DATASET": (data.AUGMENTATION.name, _reader, ("dataset", False)),
    "COLLATE_DRAWS": (data.AUGMENTATION.name, _reader, ("collate", True)),
    "LOSS_SUM": (loss.LOSS.name, _sums, (True, True)),
    "LOSS_WEIGHTED": (loss.LOSS.name, _sums, (True, False)),
    "WHITENING": (APART, lambda found: (found.module[0], found.module.before), ("Whitened", "out")),
    "EMA": (APART, lambda found: found.buffers, ["mean"]),
    "SPECTRAL": (APART, lambda found: found.moved, ["0.weight_u", "0.weight_v"]),
    "COUNTER": (state.STATE.name, lambda found: found.remembers.module, "Counts"),
    "BATCHNORM": (trainings.BATCHNORM.name, list, ["1"]),
    "F1": (metrics.METRICS.name, lambda found: found["f1"] > 1e-6, True),
    "OBJECTS": (metrics.METRICS.name, lambda f: (f["auroc"], f["looks"] > 1e-3), (0.0, True)),
    "": (metrics.METRICS.name, lambda found: set(found.values()), {0.0}),
}


def looked_at(folder, name):
    recipe = planted.write(folder, getattr(planted, name) if name else "", name="planted.py")
    return run_experiments(recipe_under_test(recipe), undisturbed().facts)


@pytest.mark.parametrize("name", FOUND)
def test_the_experiments_find_what_is_planted_and_nothing_else(name, tmp_path):
    facts = looked_at(tmp_path, name)
    present, rows = FOUND[name]
    assert facts.present == present
    evidence = with_facts(undisturbed(), present=facts.present)
    assert (
        different(replace(evidence, facts=replace(evidence.facts, results=facts.results))) == rows
    )
    if name in TOLD:
        row, of_it, told = TOLD[name]
        assert of_it(facts.results[row]) == told


def test_the_line_that_draws_unused_parameters_and_built_in_batch_sizes_are_named(tmp_path):
    facts = looked_at(tmp_path, "FUNCTIONAL")
    line = planted.line_of(tmp_path / "planted.py", "functional.dropout")
    assert list(facts.results[trainings.DROPOUT.name].values()) == [line]
    facts = looked_at(tmp_path, "OWN_GENERATOR")
    line = planted.line_of(tmp_path / "planted.py", "generator=g,")
    assert facts.results[state.STATE.name].own_generators == [line]
    facts = looked_at(tmp_path, "UNUSED")
    assert model.unused_parameters(facts) == ["spare.weight", "spare.bias"]
    tested = recipe_under_test(planted.write(tmp_path, planted.FIXED_SHAPE))
    few = replace(tested, size=replace(tested.size, global_batch=8, rest=5))
    found = run_experiments(few, undisturbed().facts).results[loss.LAST_BATCH.name]
    assert set(found) == {5, 1}
    assert found[5].startswith("RuntimeError: ")


def test_lazy_layers_are_refused_and_a_cast_to_float32_is_no_reason_to_leave_float64(tmp_path):
    with pytest.raises(UserError, match=r"lazy layers: weight, bias .*nn\.Linear"):
        looked_at(tmp_path, "LAZY")
    tested = recipe_under_test(planted.write(tmp_path, planted.FLOATS))
    assert exact_precision(tested, "fp32") == ("fp64", "", "")
    assert tested.loss(tested.held_forward.outputs, tested.batch().targets).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


NOTHING = {"kept": [], "counted": [], "optimizer": [], "draws": [], "learned": [], "asks": {}}
# What is planted → what is found of it beside checkpoints; a place is put in for {line}.
HIDDEN = {
    "BANK": ({"kept": ["the model's bank"]}, ""),
    "COUNTER": ({"kept": ["the model's calls"]}, ""),
    "STATE_IN_LOSS": ({"kept": ["the loss's calls"]}, ""),
    "OWN_OPTIMIZER": ({"optimizer": ["the optimizer's moved"]}, ""),
    "DRAWING_OPTIMIZER": ({"draws": ["torch ({line})"]}, "randn_like"),
    "LEARNED_OUTSIDE": ({"learned": ["the loss's scale"]}, ""),
    "CLOCK": ({"asks": {"time.perf_counter()": "{line}"}}, "perf_counter()"),
    "WORLD_SIZE": ({"asks": {"os.environ['WORLD_SIZE']": "{line}"}}, "WORLD_SIZE"),
    "DROPOUT": ({}, ""),
    "EXTRA_STATE": ({"counted": ["the model's steps"]}, ""),
    "JOINT_OPTIMIZER": ({}, ""),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_step_keeps_draws_or_asks_for_is_found_by_name(name, tmp_path):
    planted_here, text = HIDDEN[name]
    recipe = planted.write(tmp_path, getattr(planted, name))
    line = planted.line_of(recipe, text)
    wanted = json.loads(json.dumps(planted_here).replace("{line}", line))
    assert {**NOTHING, **find_hidden(recipe_under_test(recipe))} == {**NOTHING, **wanted}


@pytest.mark.parametrize(
    ("name", "kind"), [("ROUNDING_OPTIMIZER", "float64"), ("QUANTISED_OPTIMIZER", "int8")]
)
def test_an_optimizer_computes_in_float64_or_its_type_is_known(name, kind, tmp_path):
    tested = recipe_under_test(planted.write(tmp_path, getattr(planted, name)))
    found = trainings.OPTIMIZER.experiment(tested)
    assert (found.wide, found.kind) == (True, kind)


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
    assert any(line.startswith("test_experiments.py:") for line in seen.draws.values())
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
