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
    "BOTH": ({"batchnorm", "dropout"}, {}),
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
    "CARRIED": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "BANK": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "RUNNING_MEAN": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "NUMPY_GENERATOR": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "CLOCK": (set(), {"state": causes.CLOCK.name}),
    "KEEPS_A_MAP": (set(), {}),
    "FLOATS": (set(), {}),
    "SPARSE": (set(), {}),
    "SPECTRAL": (set(), {}),
    "CACHED": (set(), {}),
    "METRIC_OF_BATCH": (set(), {"metrics": causes.OVER_RANKS.name}),
    "F1": (set(), {"metrics": causes.OVER_RANKS.name}),
    "WHITENING": (set(), {"samples apart": causes.MIXED.name}),
    "EMA": (set(), {"samples apart": causes.BUFFERS.name}),
    "STATE_IN_LOSS": (set(), {"state": causes.IN_LOSS.name}),
    "UNUSED": (set(), {"parameters": causes.UNUSED.name}),
    "PYTHONS_RANDOM": ({"state"}, {}),
    "NUMPYS_RANDOM": ({"state"}, {}),
    "OWN_GENERATOR": ({"dropout"}, {"state": causes.OUTSIDE_MODULE.name}),
    "SEEDED_ANEW": ({"dropout"}, {}),
    "COUNTER": (set(), {"state": causes.OUTSIDE_MODULE.name}),
    "MIXES": (set(), {"samples apart": causes.MIXED.name}),
    "OWN_FORWARD": (set(), {}),
    "": (set(), {}),
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


@pytest.mark.parametrize(
    ("name", "part", "batchwise"),
    [
        ("AUGMENT", "augment", False),
        ("AUGMENT_WHOLE_BATCH", "augment", True),
        ("TRANSFORM", "transform", False),
        ("DATASET", "dataset", False),
    ],
)
def test_the_part_that_changes_a_sample_is_told_apart(name, part, batchwise, tmp_path):
    found = looked_at(tmp_path, name).found[data.AUGMENTATION.name]
    assert found == (part, batchwise)


def test_a_sum_of_losses_is_told_from_a_weighted_mean(tmp_path):
    for name, adds_up in (("LOSS_SUM", True), ("LOSS_WEIGHTED", False)):
        found = looked_at(tmp_path, name).found[loss.LOSS.name]
        assert found.full > 1e-3
        assert found.adds_up is adds_up


def test_a_batch_size_that_is_built_in_fails_with_the_incomplete_batch_and_with_one(tmp_path):
    tested = recipe_under_test(planted.write(tmp_path, planted.FIXED_SHAPE))
    few = replace(tested, size=replace(tested.size, global_batch=8, rest=5))
    found = look(few, undisturbed().facts).found[loss.LAST_BATCH.name]
    assert set(found) == {5, 1}
    assert found[5].startswith("RuntimeError: ")


def test_the_line_that_draws_and_the_module_are_named(tmp_path):
    facts = looked_at(tmp_path, "FUNCTIONAL")
    line = planted.line_of(tmp_path / "planted.py", "functional.dropout")
    assert list(facts.found[trainings.DROPOUT.name].values()) == [line]
    facts = looked_at(tmp_path, "OWN_GENERATOR")
    line = planted.line_of(tmp_path / "planted.py", "generator=g,")
    assert facts.found[state.STATE.name].own_generators == [line]
    facts = looked_at(tmp_path, "MIXES")
    found = facts.found[model.SAMPLES_APART.name]
    assert (found.module.module, found.buffers) == ("1", [])
    found = looked_at(tmp_path, "WHITENING").found[model.SAMPLES_APART.name]
    assert (found.module.module, found.module.before) == ("Whitened", "out")
    found = looked_at(tmp_path, "EMA").found[model.SAMPLES_APART.name]
    assert found.buffers == ["mean"]
    found = looked_at(tmp_path, "SPECTRAL").found[model.SAMPLES_APART.name]
    assert found.moved == ["0.weight_u", "0.weight_v"]
    facts = looked_at(tmp_path, "COUNTER")
    assert facts.found[state.STATE.name].remembers.module == "Counts"
    facts = looked_at(tmp_path, "BATCHNORM")
    assert facts.found[trainings.BATCHNORM.name] == ["1"]
    facts = looked_at(tmp_path, "UNUSED")
    assert model.unused_parameters(facts) == ["spare.weight", "spare.bias"]


def test_a_metric_that_is_made_over_the_batch_is_measured(tmp_path):
    found = looked_at(tmp_path, "METRIC_OF_BATCH").found[metrics.METRICS.name]
    assert found["spread"] > 1e-6
    found = looked_at(tmp_path, "").found[metrics.METRICS.name]
    assert set(found.values()) == {0.0}


def test_lazy_layers_are_refused_with_their_names(tmp_path):
    with pytest.raises(UserError, match=r"lazy layers: weight, bias .*nn\.Linear"):
        looked_at(tmp_path, "LAZY")


def test_a_cast_to_float32_is_no_reason_to_leave_float64(tmp_path):
    tested = recipe_under_test(planted.write(tmp_path, planted.FLOATS))
    assert exact_precision(tested, "fp32") == ("fp64", "", "")
    assert tested.loss(tested.held_forward.outputs, tested.batch().targets).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


NOTHING = {"kept": [], "optimizer": [], "draws": [], "learned": [], "asks": {}}
# What is planted → what is found of it beside checkpoints; a place is put in for {line}.
HIDDEN = {
    "CARRIED": ({"kept": ["the model's hidden"]}, ""),
    "BANK": ({"kept": ["the model's bank"]}, ""),
    "RUNNING_MEAN": ({"kept": ["the model's mean"]}, ""),
    "NUMPY_GENERATOR": ({"kept": ["the model's rng"]}, ""),
    "COUNTER": ({"kept": ["the model's calls"]}, ""),
    "STATE_IN_LOSS": ({"kept": ["the loss's calls"]}, ""),
    "OWN_OPTIMIZER": ({"optimizer": ["the optimizer's moved"]}, ""),
    "DRAWING_OPTIMIZER": ({"draws": ["torch ({line})"]}, "randn_like"),
    "LEARNED_OUTSIDE": ({"learned": ["the loss's scale"]}, ""),
    "CLOCK": ({"asks": {"time.perf_counter()": "{line}"}}, "perf_counter()"),
    "WORLD_SIZE": ({"asks": {"os.environ['WORLD_SIZE']": "{line}"}}, "WORLD_SIZE"),
    "KEEPS_A_MAP": ({}, ""),
    "DROPOUT": ({}, ""),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_step_keeps_draws_or_asks_for_is_found_by_name(name, tmp_path):
    planted_here, text = HIDDEN[name]
    recipe = planted.write(tmp_path, getattr(planted, name))
    line = planted.line_of(recipe, text)
    wanted = json.loads(json.dumps(planted_here).replace("{line}", line))
    assert vars(find_hidden(recipe_under_test(recipe))) == {**NOTHING, **wanted}
