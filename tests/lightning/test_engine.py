"""In Lightning's Trainer a recipe takes the same steps as in samestep's own loop."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import samestep
from samestep import evaluate
from samestep.shell.api.call import as_in_fresh_process
from tests import tiny
from tests.cifar_files import write_binary
from tests.command_line import read_json
from tests.processes import run_ranks, start_ranks
from tests.training.test_after_epoch import AFTER as UNFREEZES
from tests.training.test_any_batch import EXAMPLES, FP64, RECIPES
from tests.training.test_losses import MEANS, MEASURED, RECIPE
from tests.training.test_metrics import RECIPE as OBJECTS
from tests.training.test_optimizer_state import RECIPE as GATHERS
from tests.training.test_own_optimizer import BRANCHES, OWN
from tests.training.test_trajectory import CONVNET, LOADED
from tests.training.test_unkept import AFTER, BEFORE, NAMES_IT

# The trainings of two ranks are made once, for all tests of this file.
pytestmark = pytest.mark.xdist_group("lightning engine")

LIGHTNING = ("--engine", "lightning")
# Weighted sums in another order of operations; everything else is equal to the last bit.
TOLERANCE = 1e-12
# Steps between two checkpoints are for the native engine alone.
TINY = tiny.RECIPE.replace('    "checkpoint_every_steps": 4,\n', "")
# The same two groups as OWN, each with a factor of its own.
GROUPED = OWN.replace("(step, total)", "(step, total, *, epoch)").replace(
    "return 1 - step / total", "return [1 - step / total, 1 / (1 + epoch)]"
)
OF_LOSSES = ("--micro-batch-size", "4", "--patience", "1", "--momentum", "0.9", "--epochs", "2")
GRAPHS = (*FP64, *RECIPES["graphs.py"], "--batch-size", "32", "--micro-batch-size", "4")
NO_CLOSURE = TINY + GATHERS.removeprefix(tiny.RECIPE).replace("Free(m", "Slowing(m")
# A mean over samples of one class, of which some shares and micro-steps have none.
TERMS = """
from dataclasses import replace
def of_ones(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, ignore_index=0)
recipe = replace(recipe, loss=of_ones, loss_terms=lambda batch: batch[1].sum())
"""
BY_TERMS = (TINY + TERMS, ("--micro-batch-size", "2", "--batch-size", "14", "--epochs", "1"))
MIXES = """
mixed = lambda x, y: (0.7 * x + 0.3 * x[torch.randperm(len(x))], y)
recipe = replace(recipe, batch_transform=mixed)
"""
# Unfreezes layers after epoch 2, and mixes the samples of the whole batch.
UNFROZEN = (TINY.replace("recipe = Recipe(", UNFREEZES) + TERMS + MIXES, ("--epochs", "4"))
READ = ("--num-workers", "1", "--log-every", "1", "--precision", "fp64")
IMAGES = ("--width", "4", "--epochs", "1", "--batch-size", "16", "--log-every", "1")
CLIPPED = ("--clip-norm", "0.05", "--warmup-steps", "7", "--schedule", "cosine")
SGD = ("--optimizer", "sgd", "--momentum", "0.9", "--weight-decay", "0.01")
THREE = ("--epochs", "3")

# What is trained → a recipe's text, file or name, and flags. TINY has 131 samples in global batches
# of 12: odd shares, and an incomplete last batch that needs fewer micro-steps than the others.
ON_TWO = {
    "as it is": (TINY, THREE),
    "accumulated": (TINY, ("--micro-batch-size", "2", "--batch-size", "13", "--epochs", "1")),
    "sums by name": (RECIPE, OF_LOSSES),
    "means over terms": BY_TERMS,
    "unfrozen and mixed": UNFROZEN,
    "dropout": ("spiral", ("--num-samples", "301", "--epochs", "2", "--batch-size", "32")),
}
MORE_ON_TWO = {
    "ended within an epoch": (TINY, ("--max-steps", "17")),
    "own optimizer and factors": (TINY + GROUPED, ("--epochs", "2")),
    "branches": (TINY + BRANCHES, ("--find-unused", "--epochs", "2")),
    "metric objects": (TINY + OBJECTS, ("--epochs", "2")),
    # 128 and 13 graphs of 109 a step and rank: the last step needs fewer micro-steps.
    "graphs in micro-steps": (EXAMPLES / "graphs.py", GRAPHS),
    "augmented and read by a worker": (CONVNET + LOADED, READ),
    "batch norm and augmentation": ("cifar10", IMAGES),
}
OF_ROUNDING = {"dropout": 1e-6, "batch norm and augmentation": 1e-5}  # they train in fp32
ALONE = {
    "clipped, with warm-up, cosine and momentum": (TINY, (*CLIPPED, *SGD, *THREE)),
    "without the incomplete batch": (TINY, ("--drop-last", *THREE)),
    "stopped early": (TINY, ("--patience", "1", "--stop-monitor", "loss", "--lr", "0.3")),
    "stopped early in the last epoch": (TINY, ("--patience", "1", "--lr", "0.3", "--epochs", "2")),
    "not validated by accuracy": (TINY, ("--monitor", "loss", "--keep-top-k", "2")),
    "own optimizer": (TINY + OWN, ("--epochs", "2")),
    "own optimizer that calls no closure": (NO_CLOSURE, ("--epochs", "2", "--clip-norm", "0.05")),
    "means by name": (MEANS, OF_LOSSES),
    "means over terms": BY_TERMS,
    "unfrozen and mixed": UNFROZEN,
    "a loss that names the step": (TINY + BEFORE + NAMES_IT + AFTER, ("--epochs", "2")),
    "measured": (MEASURED, OF_LOSSES),
}


def as_target(target: str | Path, folder: Path) -> str:
    return str(tiny.write_recipe(folder, target) if "\n" in str(target) else target)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> Path:
    return train_on_two(ON_TWO, tmp_path_factory.mktemp("on_two"))


@pytest.fixture(scope="module")
def more_on_two(tmp_path_factory) -> Path:
    return train_on_two(MORE_ON_TWO, tmp_path_factory.mktemp("more_on_two"))


def train_on_two(recipes: dict[str, tuple], folder: Path) -> Path:
    """Train all in both engines on the same two ranks; return the folder of the runs."""
    trainings = []
    data = ("--data-dir", str(write_binary(folder / "data")))
    for name, (target, flags) in recipes.items():
        (folder / name).mkdir()
        words = [as_target(target, folder / name), *flags, *(data if target == "cifar10" else ())]
        for run, engine in (("ours", LIGHTNING), ("theirs", ())):
            trainings.append([*words, "--run-dir", folder / name / run, *engine])
    tiny.train_all(trainings, on=2, folder=folder)
    return folder


def assert_same(folder: Path, tolerance: float = TOLERANCE) -> None:
    """Compare the records, the results and the kept files of both runs in a folder."""
    ours, theirs = folder / "ours", folder / "theirs"
    tiny.assert_same_training(ours, theirs, tolerance)
    result, expected = (read_json(path / "result.json") for path in (ours, theirs))
    for key in ("status", "reason", "steps", "epochs", "best"):
        assert result[key] == pytest.approx(expected[key], rel=1e-6), key
    tested, must = (found.get("test") or {} for found in (result, expected))
    assert tested.get("loss") == pytest.approx(must.get("loss"), rel=tolerance)
    for key in ("samples", "confusion"):
        assert tested.get(key) == must.get(key), key
    kept = [sorted(p.name for p in (path / "checkpoints").iterdir()) for path in (ours, theirs)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_train_as_in_the_native_loop(on_two, name):
    assert_same(on_two / name, OF_ROUNDING.get(name, TOLERANCE))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ON_TWO)
def test_two_ranks_train_other_recipes_as_in_the_native_loop(more_on_two, name):
    assert_same(more_on_two / name, OF_ROUNDING.get(name, TOLERANCE))


@pytest.mark.parametrize("name", ALONE)
def test_a_recipe_trains_as_in_the_native_loop(tmp_path, name):
    target, flags = ALONE[name]
    recipe = as_target(target, tmp_path)
    for run, engine in (("ours", LIGHTNING), ("theirs", ())):
        tiny.trained(Path(recipe), tmp_path / run, *flags, *engine)
    assert_same(tmp_path)


def test_a_run_stopped_by_a_signal_goes_on_with_the_exact_next_step(on_two, tmp_path):
    recipe, stopped = tiny.write_recipe(tmp_path, TINY), tmp_path / "stopped"
    tiny.set_pace(recipe, 0.1)
    words = (*THREE, *LIGHTNING, "--run-dir", str(stopped))
    ranks = tiny.start(recipe, *words, world_size=2, folder=tmp_path)
    tiny.until(lambda: tiny.num_records(stopped) > 18, ranks)  # in the second epoch
    for process in ranks.processes:
        process.terminate()
    assert set(ranks.wait()) == {128 + signal.SIGTERM}, ranks.output()
    result = read_json(stopped / "result.json")
    assert result["status"] == "stopped"
    assert result["steps"] % 11, "it should stop within an epoch"
    tiny.set_pace(recipe, 0.0)
    tiny.resume(stopped, world_size=2, folder=tmp_path)
    tiny.assert_same_training(stopped, on_two / "as it is" / "ours", 0.0)


@pytest.mark.parametrize("validated", [True, False])
def test_a_run_that_ended_within_an_epoch_or_with_it_goes_on_to_a_later_end(tmp_path, validated):
    text = TINY if validated else TINY.replace("validation=(x[n:n + 37], y[n:n + 37]),", "")
    recipe = tiny.write_recipe(tmp_path, text)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path, engine in ((ours, LIGHTNING), (theirs, ())):
        for end in ("15", "22", "29", "33", "55"):
            goes_on = ("--resume",) if path.exists() else ()
            tiny.trained(recipe, path, "--max-steps", end, *engine, *goes_on)
            result = read_json(path / "result.json")
            assert (result["steps"], result["reason"]) == (int(end), "finished")
    assert losses_by_step(ours) == losses_by_step(theirs)


def losses_by_step(path: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in tiny.account(path) if r["event"] == "step"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_takes_the_steps_of_samestep_and_keeps_its_scaler(tmp_path, precision):
    twice = "nn.Tanh(), *2 * [nn.Linear(options.hidden, options.hidden)], "  # one layer, used twice
    text = tiny.changed(TINY, ("float64", "float32"), ("nn.Tanh(), ", twice))
    flags = ("--precision", precision, "--epochs", "3", "--clip-norm", "0.1")
    recipe = tiny.write_recipe(tmp_path, text)
    tiny.trained(recipe, tmp_path / "run", *flags, *LIGHTNING)
    tiny.trained(recipe, tmp_path / "own", *flags)
    state, own = (tiny.last_state(tmp_path / run) for run in ("run", "own"))
    tiny.assert_close(state["model"], own["model"], 1e-6)
    assert state["scaler"] == own["scaler"]
    assert (state["scaler"] is not None) == (precision == "fp16")


def plain_trainer(**more):
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    parts = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(**({"accelerator": "cpu"} | dict.fromkeys(parts, False) | more))


@pytest.fixture
def trainer() -> Iterator[object]:
    """Give a function that makes a Trainer, whose random numbers are no other test's."""
    with as_in_fresh_process():
        yield plain_trainer


def test_a_checkpoint_and_ranks_of_a_users_own_trainer_serve_either_engine(
    on_two, trainer, tmp_path
):
    ours, theirs = (on_two / "as it is" / name for name in ("ours", "theirs"))
    expected = read_json(theirs / "result.json")["test"]
    assert evaluate(ours)["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    module = samestep.LitRecipe.from_run(str(theirs))
    [measured] = trainer().test(module, samestep.LitData(module.recipe, module.settings))
    assert measured["test_loss"] == pytest.approx(expected["loss"], rel=1e-6)  # logged as fp32
    assert measured["test_accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)
    expected = evaluations(on_two / "dropout" / "theirs")[-2]
    for value in run_ranks(_fit, 2, tmp_path / "own"):  # the global numbers, on every rank
        assert value["val_loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert value["val_accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)


def _fit() -> dict[str, float]:
    from samestep.bridges.lightning import SpiralDataModule

    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # as torchrun says it to Lightning
    data = SpiralDataModule(num_samples=301, batch_size=32)
    module = samestep.LitRecipe(data.recipe, data.settings, data.options)
    trainer = plain_trainer(max_epochs=2, devices=2, num_sanity_val_steps=2)
    trainer.fit(module, data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def evaluations(run: Path) -> list[dict]:
    return [record for record in tiny.account(run) if record["event"] == "evaluation"]


def test_cifar10s_data_module_and_batches_of_graphs_serve_anyones_trainer(tmp_path, trainer):
    from samestep.bridges.lightning import CIFAR10DataModule

    folder = str(write_binary(tmp_path / "data"))
    data = CIFAR10DataModule(folder, batch_size=8)
    options = data.recipe.options(data_dir=folder, width=2)
    short = trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1)
    short.fit(samestep.LitRecipe(data.recipe, data.settings, options), data)
    inputs, targets, *_ = next(iter(data.train_dataloader()))
    assert inputs.shape == (8, 3, 32, 32)
    assert targets.shape == (8,)
    recipe, run = EXAMPLES / "graphs.py", tmp_path / "run"
    tiny.trained(recipe, run, "--epochs", "1")
    (expected,) = evaluations(run)
    own = trainer(max_epochs=1)
    own.fit(samestep.LitRecipe(str(recipe)), samestep.LitData(str(recipe)))
    for name, rel in (("loss", 1e-5), ("accuracy", 1e-6)):
        found = float(own.callback_metrics[f"val_{name}"])
        assert found == pytest.approx(expected[name], rel=rel)


@pytest.mark.parametrize(
    ("ends", "named"),
    [({"max_epochs": 1}, "accumulate_grad_batches=4"), ({"max_time": "00:00:01:00"}, "max_steps")],
)
def test_a_trainer_that_accumulates_otherwise_or_has_no_end_is_told(trainer, ends, named):
    settings = samestep.Settings(epochs=1, micro_batch_size=8, batch_size=32)
    given = (kind("spiral", settings) for kind in (samestep.LitRecipe, samestep.LitData))
    with pytest.raises(samestep.UserError, match=named):
        trainer(**ends).fit(*given)


def test_data_modules_take_the_numbers_of_the_next_trainer_or_of_none(trainer):
    from samestep.bridges.lightning import SpiralDataModule

    data = SpiralDataModule(num_samples=200)
    module = samestep.LitRecipe(data.recipe, data.settings, data.options)
    trainer().validate(module, data, verbose=False)
    trainer(max_epochs=1).fit(module, data)
    assert data.plan.total_steps == 5  # of 140 samples in batches of 32
    again = trainer(max_epochs=3, accumulate_grad_batches=2)
    again.fit(module, data)
    assert (data.plan.accumulate, data.plan.total_steps, again.global_step) == (2, 15, 15)
    data = SpiralDataModule(num_samples=200, batch_size=8)
    data.setup("fit")
    inputs, targets, *_ = next(iter(data.train_dataloader()))
    assert (inputs.shape, targets.shape) == ((8, 2), (8,))


REFUSED = ("--compile on", "--eval-every-steps 5", "--ema 0.9")
REFUSED += ("--checkpoint-every-minutes 5", "--checkpoint-every-epochs 2")


def test_what_lightning_cannot_do_is_refused_before_anything_is_written(tmp_path, refused):
    path = tmp_path / "run"
    text = TINY.replace("Recipe(", 'Recipe(loss_over="batch", ')
    recipe = tiny.write_recipe(tmp_path, text)
    for target, flag in (*(("spiral", flag) for flag in REFUSED), (str(recipe), "")):
        message = refused("train", target, *flag.split(), *LIGHTNING, "--run-dir", str(path))
        assert (flag or "loss_over") in message
        assert "--engine native" in message
        assert not path.exists()


def test_without_lightning_the_extra_is_named_and_the_native_engine_never_needs_it(here, tmp_path):
    ranks = start_ranks(_train_without_lightning, 1, tmp_path / "output")
    assert ranks.wait() == [2], ranks.output()
    assert "pip install 'samestep[lightning]'" in ranks.output()
    assert ranks.output().count("samestep: ") == 1


def _train_without_lightning() -> None:
    for name in [*sys.modules]:  # as if it were not installed: the fork server holds it
        if name.partition(".")[0] == "lightning":
            sys.modules[name] = None
        elif name.partition(".")[0] == "samestep":
            del sys.modules[name]  # read with this module; now it has to do without
    from samestep.shell.cli import main

    train = ["train", "spiral", "--epochs", "1", "--num-samples", "200"]
    assert main(train) == 0
    sys.exit(main([*train, *LIGHTNING]))
