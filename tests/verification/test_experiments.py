"""What is planted in a recipe is found by the experiments of one process, and nothing else is."""

import json
from dataclasses import replace

import pytest
import torch

from samestep.base.errors import UserError
from samestep.prove.verification import causes
from samestep.prove.verification.recipe_under_test import exact_precision
from samestep.prove.verification.rows import (
    data,
    look,
    loss,
    metrics,
    model,
    rounding,
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
NOTHING += ("COLLATE_BY_SAMPLE", "EXTRA_STATE")
AUGMENTED = ("AUGMENT", "AUGMENT_WHOLE_BATCH", "TRANSFORM", "DATASET")
FOUND = {
    **dict.fromkeys(NOTHING, (set(), {})),
    "BATCHNORM": ({"batchnorm"}, {}),
    **dict.fromkeys(("DROPOUT", "FUNCTIONAL"), ({"dropout"}, {})),
    **dict.fromkeys(AUGMENTED, (set(), UNKEYED)),
    **dict.fromkeys(("LOSS_SUM", "LOSS_WEIGHTED"), (set(), NOT_A_MEAN)),
    "MEAN_SAID_TO_BE_A_SUM": (set(), {"loss": causes.A_MEAN.name}),
    "OTHER_TERMS": (set(), {"loss": causes.OF_TERMS.name}),
    "LAST_BENT": (set(), {"last batch": causes.UNEVEN_BATCH.name}),
    "CONTRAST": (set(), {"loss": causes.OF_BATCH.name}),
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
    return found.full > 1e-3, found.adds_up


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


def test_the_line_that_draws_unused_parameters_and_built_in_batch_sizes_are_named(tmp_path):
    facts = looked_at(tmp_path, "FUNCTIONAL")
    line = planted.line_of(tmp_path / "planted.py", "functional.dropout")
    assert list(facts.found[trainings.DROPOUT.name].values()) == [line]
    facts = looked_at(tmp_path, "OWN_GENERATOR")
    line = planted.line_of(tmp_path / "planted.py", "generator=g,")
    assert facts.found[state.STATE.name].own_generators == [line]
    facts = looked_at(tmp_path, "UNUSED")
    assert model.unused_parameters(facts) == ["spare.weight", "spare.bias"]
    tested = recipe_under_test(planted.write(tmp_path, planted.FIXED_SHAPE))
    few = replace(tested, size=replace(tested.size, global_batch=8, rest=5))
    found = look(few, undisturbed().facts).found[loss.LAST_BATCH.name]
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
    assert vars(find_hidden(recipe_under_test(recipe))) == {**NOTHING, **wanted}


@pytest.mark.parametrize(
    ("name", "kind"), [("ROUNDING_OPTIMIZER", "float64"), ("QUANTISED_OPTIMIZER", "int8")]
)
def test_an_optimizer_computes_in_float64_or_its_type_is_known(name, kind, tmp_path):
    tested = recipe_under_test(planted.write(tmp_path, getattr(planted, name)))
    found = rounding.OPTIMIZER.look(tested)
    assert (found.wide, found.kind) == (True, kind)
