"""Settings under their other names: with a unit, with a direction, in a table of the TOML file."""

import os

import pytest

import samestep
from samestep.base.settings import canonical_names
from samestep.shell.commands.target import canonical_flags
from tests.command_line import call


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"eval_every": "500steps"}, {"eval_every_steps": 500}),
        ({"eval_every": "2epochs,1 step"}, {"eval_every_epochs": 2, "eval_every_steps": 1}),
        ({"checkpoint_every": "30min"}, {"checkpoint_every_minutes": 30.0}),
        ({"checkpoint_every": ["1epoch", "0.5minutes"]}, {"checkpoint_every_minutes": 0.5}),
        ({"monitor": "loss:min"}, {"monitor": "loss", "mode": "min"}),
        ({"monitor": "accuracy"}, {"monitor": "accuracy"}),
        ({"track": {"to": "wandb", "project": "a"}}, {"track": "wandb", "track_project": "a"}),
        ({"global_batch_size": 8}, {"batch_size": 8}),
        ({"global_batch_size": 8, "batch_size": 8}, {"batch_size": 8}),
    ],
    ids=str,
)
def test_a_setting_has_the_names_of_its_fields(given, own):
    assert own.items() <= canonical_names(given, "a test").items()


@pytest.mark.parametrize(
    "given",
    [
        {"eval_every": "500"},
        {"eval_every": "2.5steps"},
        {"eval_every": "30min"},
        {"eval_every": "500steps", "eval_every_steps": 400},
        {"eval_every_steps": 400, "eval_every": "500steps"},
        {"monitor": "loss:min", "mode": "max"},
        {"checkpoint_every": "1epoch,2epochs"},
    ],
    ids=str,
)
def test_what_has_no_unit_or_two_values_is_refused(given):
    with pytest.raises(samestep.UserError, match=r"every|mode"):
        canonical_names(given, "a test")


@pytest.mark.parametrize(
    "words",
    [
        "--monitor loss:min --mode max",
        "--mode=max --monitor loss:min",
        "--checkpoint-every 5steps --checkpoint-every-steps 3",
    ],
)
def test_two_flags_that_set_one_field_differently_are_refused(words):
    with pytest.raises(samestep.UserError, match="both set"):
        canonical_flags(["spiral", *words.split()])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epochs": 2.0}, "epochs = 2.0: it must be a whole number."),
        ({"lr": "0.1"}, "it must be a number."),
        ({"compile": "yes"}, "it must be one of 'off', 'on'."),
        ({"hidden_dims": 8}, "it must be a list, each a whole number."),
        ({"max_steps": 10**25}, "be below 2^63"),
        ({"betas": [0.9, 0.95]}, "'betas'. Recipe(optimizer=…) sets it. The settings"),
        ({"worker": 2}, "Did you mean 'num_workers'? The settings"),
        ({"pleasures": 2}, "'pleasures'. The settings"),
    ],
    ids=str,
)
def test_a_value_or_a_name_that_no_setting_has_is_told_in_words(given, said):
    with pytest.raises(samestep.UserError) as told:
        samestep.train("spiral", **given)
    assert said in str(told.value)


@pytest.mark.parametrize("kind", ["deep", "pipe"])
def test_a_settings_file_that_cannot_be_one_is_refused(here, refused, kind):
    if kind == "deep":
        (here / "a.toml").write_text("a = " + "[" * 3000 + "]" * 3000)
    else:
        os.mkfifo(here / "a.toml")
    assert "a.toml" in refused("train", "spiral", "--config", "a.toml")


def test_flags_that_set_a_field_alike_are_taken_and_some_have_units(here):
    words = "--checkpoint-every 30min --checkpoint-every-minutes 30 --eval-every 2steps"
    assert "30" in canonical_flags(["spiral", *words.split()])
    last = "--monitor loss:min --monitor accuracy --eval-every 2steps --eval-every 1epoch"
    assert canonical_flags(last.split()) == ["--monitor", "accuracy", "--eval-every-epochs", "1"]
    (here / "my.toml").write_text('checkpoint_every = "30min"\n[track]\noffline = true\n')
    flags = ("--eval-every=1epoch,2steps", "--monitor", "loss:min", "--max-steps", "2")
    command = ("train", "spiral", "--config", "my.toml", "--num-samples", "200", *flags)
    assert call(*command, "--run-dir", "run") == 0
    kept = samestep.TrainedRun("run").settings
    assert kept["eval_every_steps"] == 2
    assert kept["checkpoint_every_minutes"] == 30
    assert (kept["monitor"], kept["mode"]) == ("loss", "min")
    assert kept["track_offline"] is True
