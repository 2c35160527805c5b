"""Each cause is planted in a small recipe, and found with the right name by real ranks."""

from pathlib import Path

import pytest

from samestep.verification import causes
from tests.verification import planted
from tests.verification.forked import check, differing, verified

TRAINING = ("2 ranks", "fp32", "accumulation", "stop and resume")
# What is planted → the rows that must differ, each with its cause. No others may.
ROWS = {
    "BATCHNORM": {"BatchNorm": causes.BATCHNORM},
    "DROPOUT": {"dropout": causes.DROPOUT},
    "FUNCTIONAL": {"dropout": causes.DROPOUT},
    "BOTH": {"BatchNorm": causes.BATCHNORM, "dropout": causes.DROPOUT},
    "AUGMENT": dict.fromkeys((*TRAINING, "augmentation"), causes.AUGMENTATION),
    "AUGMENT_WHOLE_BATCH": dict.fromkeys((*TRAINING, "augmentation"), causes.AUGMENTATION),
    "DATASET": dict.fromkeys((*TRAINING, "augmentation"), causes.AUGMENTATION),
    "LOSS_SUM": dict.fromkeys((*TRAINING, "loss", "metrics"), causes.LOSS),
    "LOSS_WEIGHTED": dict.fromkeys((*TRAINING, "loss", "metrics"), causes.LOSS),
    "METRIC_OF_BATCH": {"metrics": causes.METRIC},
    "METRIC_OVER_RANKS": {"metrics": causes.METRIC},
    "ORDER": dict.fromkeys((*TRAINING, "order"), causes.ORDER),
    "UNUSED": {"parameters": causes.UNUSED},
    "PYTHONS_RANDOM": {"state": causes.STATE},
    "NUMPYS_RANDOM": {"state": causes.STATE},
    "OWN_GENERATOR": {"dropout": causes.DROPOUT, "state": causes.STATE},
    "SEEDED_ANEW": {"dropout": causes.DROPOUT},
    "COUNTER": dict.fromkeys(
        ("accumulation", "stop and resume", "state", "one device"), causes.STATE
    ),
    "MIXES": dict.fromkeys((*TRAINING, "samples apart", "metrics"), causes.MIXING),
    "WRITES": {"one writer": "every rank writes"},
    "WRITES_OF_ITS_OWN": {},
    "OWN_FORWARD": {},
    "PRINTS": {},
    "": {},
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_planted_is_found_and_named_and_nothing_else(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = getattr(planted, name) if name else ""
    recipe = planted.write(tmp_path, text, name=f"p_{name.lower() or 'good'}.py")
    report = verified(recipe, folder=tmp_path / "ranks")
    assert differing(report) == ROWS[name]
    assert report.same is (not ROWS[name])


def test_a_batch_size_that_is_built_in_fails_in_the_last_uneven_batch(tmp_path):
    recipe = planted.write(tmp_path, planted.FIXED_SHAPE, name="p_fixed.py")
    report = verified(recipe, folder=tmp_path / "ranks", batch=8)
    assert differing(report) == {"one process": causes.LAST_BATCH}
    (found,) = report.checks
    assert found.first_step == report.facts.cut.uneven_step
    assert planted.line_of(recipe, "reshape") in found.why


def test_a_loss_that_is_bent_for_few_samples_is_the_last_uneven_batchs(tmp_path):
    recipe = planted.write(tmp_path, planted.LAST_BENT, name="p_bent.py")
    report = verified(recipe, folder=tmp_path / "ranks", batch=8)
    rows = (*TRAINING, "last batch")
    assert differing(report) == dict.fromkeys(rows, causes.LAST_BATCH)
    assert check(report, "2 ranks").first_step == report.facts.cut.uneven_step


def test_parameters_that_only_some_steps_use_are_named_where_ranks_fail(tmp_path):
    recipe = planted.write(tmp_path, planted.UNUSED_AT_TIMES, name="p_times.py")
    found = check(verified(recipe, folder=tmp_path / "ranks"), "2 ranks")
    assert found.cause == causes.UNUSED
    assert "It failed" in found.why


def test_ranks_that_hold_other_numbers_of_samples_are_told_of(tmp_path):
    recipe = planted.write(tmp_path, planted.SIZES, name="p_sizes.py")
    report = verified(recipe, folder=tmp_path / "ranks")
    assert check(report, "order").cause == causes.ORDER
    assert check(report, "2 ranks").cause == causes.ORDER


def test_a_cause_is_told_with_its_place_and_what_to_do(tmp_path):
    recipe = planted.write(tmp_path, planted.FUNCTIONAL, name="p_functional.py")
    found = check(verified(recipe, folder=tmp_path / "ranks"), "dropout")
    assert planted.line_of(recipe, "functional.dropout") in found.why
    assert "--accept dropout" in found.advice
    assert (found.first_step, found.first_parameter) == (1, "line.weight")
    assert found.difference is not None
    assert found.tolerance is not None
    assert found.difference > found.tolerance


@pytest.mark.parametrize("how", ["flag", "recipe"])
def test_what_is_accepted_is_still_shown_and_no_longer_calls_the_training_different(how, tmp_path):
    text = planted.BOTH
    if how == "recipe":
        text += 'recipe = replace(recipe, accepts=("batchnorm", "dropout"))\n'
    recipe = planted.write(tmp_path, text, name=f"p_accepted_{how}.py")
    accept = ("batchnorm", "dropout") if how == "flag" else ()
    report = verified(recipe, folder=tmp_path / "ranks", accept=accept)
    assert report.same
    for name in ("BatchNorm", "dropout"):
        assert check(report, name).status == "accepted"
        assert check(report, name).why


def test_what_is_accepted_hides_no_other_cause(tmp_path):
    text = planted.DROPOUT + planted.LOSS_SUM
    recipe = planted.write(tmp_path, text, name="p_accepted_more.py")
    report = verified(recipe, folder=tmp_path / "ranks", accept=("dropout", "batchnorm"))
    assert check(report, "dropout").status == "accepted"
    assert set(differing(report).values()) == {causes.LOSS}


def test_a_tolerance_compares_losses_alone_and_turns_causes_into_notes(tmp_path):
    recipe = planted.write(tmp_path, planted.DROPOUT, name="p_tolerance.py")
    strict = verified(recipe, folder=tmp_path / "strict", tolerance=1e-6)
    assert differing(strict) == {"dropout": causes.DROPOUT}
    report = verified(recipe, folder=tmp_path / "ranks", tolerance=0.9)
    assert report.same
    assert check(report, "dropout").tolerance == 0.9
    assert check(strict, "2 ranks").compared.startswith("losses, ranks' weights: ")
    assert any("--tolerance 0.9" in note for note in report.notes)


def test_no_row_is_the_same_with_more_than_it_allows(tmp_path):
    recipe = planted.write(tmp_path, planted.LOSS_SUM, name="p_sum.py")
    report = verified(recipe, folder=tmp_path / "ranks")
    assert check(report, "last batch").status == "skipped"
    for row in report.checks:
        if row.status == "same" and row.difference is not None:
            assert row.difference <= row.tolerance, row.name


def test_a_generator_of_ones_own_is_told_with_its_line_whatever_is_accepted(tmp_path):
    recipe = planted.write(tmp_path, planted.OWN_GENERATOR, name="p_generator.py")
    report = verified(recipe, folder=tmp_path / "ranks", sizes=(1,), accept=("dropout",))
    assert differing(report) == {"state": causes.STATE}
    assert planted.line_of(recipe, "generator=g,") in check(report, "state").why


def test_what_ranks_print_is_a_note_with_its_line(tmp_path):
    recipe = planted.write(tmp_path, planted.PRINTS, name="p_prints.py")
    found = check(verified(recipe, folder=tmp_path / "ranks"), "one writer")
    assert found.status == "note"
    assert planted.line_of(recipe, "print(") in found.why
    assert "reading data" in found.why


def test_a_model_that_cannot_compute_in_float64_is_compared_in_its_own_precision(tmp_path):
    text = """
class Single(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.float(), self.bias.float())
recipe = replace(recipe, model=lambda: Single(6, 2))
"""
    recipe = planted.write(tmp_path, text, name="p_single.py")
    report = verified(recipe, folder=tmp_path / "ranks")
    assert report.same
    assert report.facts.exact == "fp32"
    assert "RuntimeError" in report.facts.inexact


def test_a_rank_that_is_killed_leaves_a_row_that_failed(tmp_path):
    text = """
import os, signal
def loss(outputs, targets):
    if os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, targets)
recipe = replace(recipe, loss=loss)
"""
    recipe = planted.write(tmp_path, text, name="p_killed.py")
    report = verified(recipe, folder=tmp_path / "ranks")
    assert not check(report, "2 ranks").passed
    assert check(report, "one process").passed


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    home = tmp_path / "temporary"
    home.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(home))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    verified(planted.write(tmp_path, name="p_left.py"), folder=tmp_path / "ranks")
    assert not list(home.iterdir())
    assert not list(Path().iterdir())
