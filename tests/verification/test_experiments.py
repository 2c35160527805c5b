"""What is planted in a recipe is found by the experiments of one process, and nothing else is."""

import json
from dataclasses import replace

import pytest
import torch

from samestep.errors import UserError
from samestep.verification import causes
from samestep.verification.recipe_under_test import exact_precision
from samestep.verification.rows import data, look, loss, metrics, model, state, trainings
from samestep.verification.rows.state import find_hidden
from tests.verification import planted
from tests.verification.made_up import different, recipe_under_test, undisturbed, with_facts

# What is planted → (the kinds of draws, the rows that differ whatever the ranks do).
FOUND = {
    "BATCHNORM": ({"batchnorm"}, {}),
    "DROPOUT": ({"dropout"}, {}),
    "FUNCTIONAL": ({"dropout"}, {}),
    "AUGMENT": (set(), {"augmentation": causes.UNKEYED["augment"].name}),
    "AUGMENT_WHOLE_BATCH": (set(), {"augmentation": causes.UNKEYED["augment"].name}),
    "TRANSFORM": (set(), {"augmentation": causes.UNKEYED["augment"].name}),
    "DATASET": (set(), {"augmentation": causes.UNKEYED["augment"].name}),
    "LOSS_SUM": (set(), {"loss": causes.NOT_A_MEAN.name}),
    "LOSS_SUM_SAID": (set(), {}),
    "MEAN_SAID_TO_BE_A_SUM": (set(), {"loss": causes.A_MEAN.name}),
    "LOSS_WEIGHTED": (set(), {"loss": causes.NOT_A_MEAN.name}),
    "LOSS_OF_TERMS": (set(), {}),
    "OTHER_TERMS": (set(), {"loss": causes.OF_TERMS.name}),
    "LAST_BENT": (set(), {"last batch": causes.UNEVEN_BATCH.name}),
    "CONTRAST": (set(), {"loss": causes.OF_BATCH.name}),
    "BANK": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "CARRIED": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "CACHED": (set(), {}),
    "NUMPY_GENERATOR": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "CLOCK": (set(), {"state": causes.CLOCK.name}),
    "FLOATS": (set(), {}),
    "SPARSE": (set(), {}),
    "SPECTRAL": (set(), {}),
    "F1": (set(), {"metrics": causes.OVER_RANKS.name}),
    "WHITENING": (set(), {"samples apart": causes.MIXED.name}),
    "EMA": (set(), {"samples apart": causes.BUFFERS.name}),
    "STATE_IN_LOSS": (set(), {"state": causes.IN_LOSS.name}),
    "UNUSED": (set(), {"parameters": causes.UNUSED.name}),
    "PYTHONS_RANDOM": ({"state"}, {}),
    "OWN_GENERATOR": ({"dropout"}, {"state": causes.OUTSIDE_MODULE.name}),
    "COUNTER": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "": (set(), {}),
}


def _sums(found):
    return found.full > 1e-3, found.adds_up


APART = model.SAMPLES_APART.name
# What is planted → a row that tells more, what of it is looked at, and what that has to be.
TOLD = {
    "AUGMENT": (data.AUGMENTATION.name, tuple, ("augment", False)),
    "AUGMENT_WHOLE_BATCH": (data.AUGMENTATION.name, tuple, ("augment", True)),
    "TRANSFORM": (data.AUGMENTATION.name, tuple, ("transform", False)),
    "DATASET": (data.AUGMENTATION.name, tuple, ("dataset", False)),
    "LOSS_SUM": (loss.LOSS.name, _sums, (True, True)),
    "LOSS_WEIGHTED": (loss.LOSS.name, _sums, (True, False)),
    "WHITENING": (APART, lambda found: (found.module[0], found.module.before), ("Whitened", "out")),
    "EMA": (APART, lambda found: found.buffers, ["mean"]),
    "SPECTRAL": (APART, lambda found: found.moved, ["0.weight_u", "0.weight_v"]),
    "COUNTER": (state.STATE.name, lambda found: found.remembers.module, "Counts"),
    "BATCHNORM": (trainings.BATCHNORM.name, list, ["1"]),
    "F1": (metrics.METRICS.name, lambda found: found["f1"] > 1e-6, True),
    "": (metrics.METRICS.name, lambda found: set(found.values()), {0.0}),
}


def looked_at(folder, name):
    """Return what the first process finds out about a recipe with something planted."""
    recipe = planted.write(folder, getattr(planted, name) if name else "", name="planted.py")
    return look(recipe_under_test(recipe), undisturbed().facts)


@pytest.mark.parametrize("name", FOUND)
def test_the_experiments_find_what_is_planted_and_nothing_else(name, tmp_path):
    facts = looked_at(tmp_path, name)
    present, rows = FOUND[name]
    assert facts.present == present
    evidence = with_facts(undisturbed(), present=facts.present)
    assert different(replace(evidence, facts=replace(evidence.facts, found=facts.found))) == rows
    if name in TOLD:
        row, of_it, told = TOLD[name]
        assert of_it(facts.found[row]) == told


def test_a_batch_size_that_is_built_in_fails_with_the_incomplete_batch_and_with_one(tmp_path):
    tested = recipe_under_test(planted.write(tmp_path, planted.FIXED_SHAPE))
    few = replace(tested, size=replace(tested.size, global_batch=8, rest=5))
    found = look(few, undisturbed().facts).found[loss.LAST_BATCH.name]
    assert set(found) == {5, 1}
    assert found[5].startswith("RuntimeError: ")


def test_the_line_that_draws_and_unused_parameters_are_named(tmp_path):
    facts = looked_at(tmp_path, "FUNCTIONAL")
    line = planted.line_of(tmp_path / "planted.py", "functional.dropout")
    assert list(facts.found[trainings.DROPOUT.name].values()) == [line]
    facts = looked_at(tmp_path, "OWN_GENERATOR")
    line = planted.line_of(tmp_path / "planted.py", "generator=g,")
    assert facts.found[state.STATE.name].own_generators == [line]
    facts = looked_at(tmp_path, "UNUSED")
    assert model.unused_parameters(facts) == ["spare.weight", "spare.bias"]


def test_lazy_layers_are_refused_and_a_cast_to_float32_is_no_reason_to_leave_float64(tmp_path):
    with pytest.raises(UserError, match=r"lazy layers: weight, bias .*nn\.Linear"):
        looked_at(tmp_path, "LAZY")
    tested = recipe_under_test(planted.write(tmp_path, planted.FLOATS))
    assert exact_precision(tested, "fp32") == ("fp64", "", "")
    assert tested.loss(tested.held_forward.outputs, tested.batch().targets).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


NOTHING = {"kept": [], "optimizer": [], "draws": [], "learned": [], "asks": {}}
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
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_step_keeps_draws_or_asks_for_is_found_by_name(name, tmp_path):
    planted_here, text = HIDDEN[name]
    recipe = planted.write(tmp_path, getattr(planted, name))
    line = planted.line_of(recipe, text)
    wanted = json.loads(json.dumps(planted_here).replace("{line}", line))
    assert vars(find_hidden(recipe_under_test(recipe))) == {**NOTHING, **wanted}
