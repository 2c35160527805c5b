"""In Lightning's Trainer a recipe takes the same steps as in samestep's own loop."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samestep import evaluate
from tests import tiny
from tests.cifar_files import write_binary
from tests.command_line import read_json
from tests.idx_files import write_mnist
from tests.processes import TIMEOUT_S, run_ranks, start_ranks
from tests.training.test_losses import MEANS, MEASURED, RECIPE
from tests.training.test_own_optimizer import BRANCHES, OWN
from tests.training.test_trajectory import CONVNET, LOADED

LIGHTNING = ("--engine", "lightning")
# Weighted sums in another order of operations; everything else is equal to the last bit.
TOLERANCE = 1e-12

# 131 samples in global batches of 12: odd shares, and an incomplete last batch that needs fewer
# micro-steps than the others.
SETTINGS = {
    "as it is": (),
    "clipped, with warm-up, cosine and momentum": (
        *("--clip-norm", "0.05", "--warmup-steps", "7", "--schedule", "cosine"),
        *("--optimizer", "sgd", "--momentum", "0.9", "--weight-decay", "0.01"),
    ),
    "accumulated": ("--micro-batch-size", "2", "--batch-size", "13"),
    "without the incomplete batch": ("--drop-last",),
    "ended within an epoch": ("--max-steps", "17"),
    "stopped early": ("--patience", "1", "--lr", "0.3"),
    "not validated by accuracy": ("--monitor", "loss", "--keep-top-k", "2"),
}
# Steps between two checkpoints are for the native engine alone.
TINY = tiny.RECIPE.replace('    "checkpoint_every_steps": 4,\n', "")


def with_both(folder: Path, target: object, *flags: str, world_size: int = 1) -> tuple[Path, Path]:
    """Train in Lightning and in the native loop; return both runs."""
    runs = folder / "ours", folder / "theirs"
    for path, engine in zip(runs, (LIGHTNING, ()), strict=True):
        tiny.trained(target, path, *flags, *engine, on=world_size)
    return runs


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("as it is", 1), *((name, 2 - place % 2) for place, name in enumerate(SETTINGS))],
)
def test_a_recipe_trains_as_in_the_native_loop(tmp_path, name, world_size):
    recipe = tiny.write_recipe(tmp_path, TINY)
    ours, theirs = with_both(tmp_path, recipe, *SETTINGS[name], world_size=world_size)
    tiny.assert_same_training(ours, theirs, TOLERANCE)
    result, expected = (read_json(path / "result.json") for path in (ours, theirs))
    for key in ("status", "reason", "steps", "epochs", "best"):
        assert result[key] == pytest.approx(expected[key]), key
    assert result["test"]["samples"] == expected["test"]["samples"]
    assert result["test"]["loss"] == pytest.approx(expected["test"]["loss"], rel=TOLERANCE)
    kept, expected_kept = (
        sorted(p.name for p in (path / "checkpoints").iterdir()) for path in (ours, theirs)
    )
    assert kept == expected_kept


@pytest.mark.parametrize(
    ("text", "world_size"),
    [(MEASURED, 1), (RECIPE, 2), (MEANS, 2)],
    ids=["measured", "sum", "means"],
)
def test_sums_and_losses_by_name_are_those_of_the_native_loop(tmp_path, text, world_size):
    recipe = tiny.write_recipe(tmp_path, text)
    flags = ("--micro-batch-size", "4", "--patience", "1", "--momentum", "0.9")
    ours, theirs = with_both(tmp_path, recipe, *flags, world_size=world_size)
    tiny.assert_same_training(ours, theirs, TOLERANCE)
    assert read_json(ours / "result.json")["best"]["metric"] == "kl"


@pytest.mark.parametrize(
    ("target", "flags", "world_size"),
    [
        ("spiral", ("--num-samples", "700"), 1),
        ("spiral", ("--num-samples", "700", "--log-every", "1"), 2),
        ("mnist", ("--data-dir", "mnist", "--model", "convnet", "--log-every", "1"), 2),
    ],
)
def test_recipes_with_dropout_draw_the_same(tmp_path, target, flags, world_size, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path / "mnist")
    flags = ("--epochs", "1", "--batch-size", "32", *flags)
    ours, theirs = with_both(tmp_path, target, *flags, world_size=world_size)
    tiny.assert_same_training(ours, theirs, 1e-6)


def test_a_resnet_with_batch_norm_and_augmentation_is_the_same(tmp_path):
    data = write_binary(tmp_path / "data")
    flags = ("--data-dir", str(data), "--width", "4", "--epochs", "2", "--batch-size", "16")
    ours, theirs = with_both(tmp_path, "cifar10", *flags, "--log-every", "1", world_size=2)
    tiny.assert_same_training(ours, theirs, 1e-5)
    result, expected = (read_json(path / "result.json")["test"] for path in (ours, theirs))
    assert result["confusion"] == expected["confusion"]


def test_cifar10s_data_module_feeds_anyones_module(tmp_path):
    data = write_binary(tmp_path / "data")
    [[inputs, targets]] = run_ranks(_first_batch, 1, tmp_path / "out", str(data))
    assert inputs == [8, 3, 32, 32]
    assert targets == [8]


def _first_batch(folder: str) -> list[list[int]]:
    from samestep import LitRecipe
    from samestep.lightning import CIFAR10DataModule

    data = CIFAR10DataModule(folder, batch_size=8)
    trainer = _trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=1)
    options = data.recipe.options(data_dir=folder, width=2)
    trainer.fit(LitRecipe(data.recipe, data.settings, options), data)
    inputs, targets, *_ = next(iter(data.train_dataloader()))
    return [list(inputs.shape), list(targets.shape)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_augmented_data_read_by_workers_is_the_same(tmp_path, world_size):
    recipe = tiny.write_recipe(tmp_path, CONVNET + LOADED)
    flags = ("--num-workers", "1", "--log-every", "1", "--precision", "fp64")
    ours, theirs = with_both(tmp_path, recipe, *flags, world_size=world_size)
    tiny.assert_same_training(ours, theirs, TOLERANCE)


def test_a_run_stopped_by_a_signal_goes_on_with_the_exact_next_step(tmp_path):
    recipe = tiny.write_recipe(tmp_path, TINY)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    tiny.train(recipe, *LIGHTNING, "--run-dir", str(whole), world_size=2, folder=tmp_path)
    tiny.set_pace(recipe, 0.05)
    ranks = tiny.start(recipe, *LIGHTNING, "--run-dir", str(stopped), world_size=2, folder=tmp_path)
    tiny.until(lambda: tiny.num_records(stopped) > 18, ranks)  # in the second epoch
    for process in ranks.processes:
        process.terminate()
    assert set(ranks.wait()) == {128 + signal.SIGTERM}, ranks.output()
    result = read_json(stopped / "result.json")
    assert result["status"] == "stopped"
    assert result["steps"] % 11, "it should stop within an epoch"
    tiny.set_pace(recipe, 0.0)
    tiny.resume(stopped, world_size=2, folder=tmp_path)
    tiny.assert_same_training(stopped, whole, 0.0)


@pytest.mark.parametrize("validated", [True, False])
def test_a_run_that_ended_within_an_epoch_goes_on_to_a_later_end(tmp_path, validated):
    text = TINY if validated else TINY.replace("validation=(x[n:n + 37], y[n:n + 37]),", "")
    recipe = tiny.write_recipe(tmp_path, text)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path, engine in ((ours, LIGHTNING), (theirs, ())):
        for end in ("15", "29", "33"):
            goes_on = ("--resume",) if path.exists() else ()
            tiny.trained(recipe, path, "--max-steps", end, *engine, *goes_on)
            result = read_json(path / "result.json")
            assert (result["steps"], result["reason"]) == (int(end), "finished")
    assert losses_by_step(ours) == losses_by_step(theirs)


def losses_by_step(path: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in tiny.account(path) if r["event"] == "step"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains_clipped_and_keeps_its_scaler(tmp_path, precision):
    recipe = tiny.write_recipe(tmp_path, TINY.replace("float64", "float32"))
    flags = ("--precision", precision, "--clip-norm", "0.1", *LIGHTNING)
    tiny.trained(recipe, tmp_path / "run", *flags)
    state = tiny.last_state(tmp_path / "run")
    assert (state["scaler"] is not None) == (precision == "fp16")
    if precision == "fp16":
        assert state["scaler"]["scale"] > 1
    losses = [r["loss"] for r in tiny.account(tmp_path / "run") if r["event"] == "epoch"]
    assert losses[-1] < losses[0]


def test_a_checkpoint_of_either_engine_evaluates_in_the_other(tmp_path):
    ours, theirs = with_both(tmp_path, tiny.write_recipe(tmp_path, TINY))
    expected = read_json(theirs / "result.json")["test"]
    assert evaluate(ours)["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
    [measured] = run_ranks(_measure_with_lightning, 1, tmp_path / "lightning", str(theirs))
    assert measured["test_loss"] == pytest.approx(expected["loss"], rel=1e-6)  # logged as fp32
    assert measured["test_accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)


def _measure_with_lightning(path: str) -> dict[str, float]:
    from samestep import LitData, LitRecipe

    module = LitRecipe.from_run(path)
    [measured] = _trainer().test(module, LitData(module.recipe, module.settings))
    return dict(measured)


def _trainer(**more):
    import logging
    import warnings

    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    plain = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**(plain | more))


@pytest.mark.parametrize("world_size", [1, 2])
def test_in_a_users_own_trainer_it_learns_what_samestep_train_does(tmp_path, world_size):
    path = tmp_path / "run"
    flags = ("--num-samples", "701", "--epochs", "2", "--batch-size", "32")
    tiny.trained("spiral", path, *flags, on=world_size)
    expected = [r for r in tiny.account(path) if r["event"] == "evaluation"][-2]
    values = run_ranks(_fit, world_size, tmp_path / "own", 32)
    for value in values:  # the global numbers, on every rank
        assert value["val_loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert value["val_accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)


def _fit(batch_size: int) -> dict[str, float]:
    import os

    from samestep import LitRecipe
    from samestep.lightning import SpiralDataModule

    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # as torchrun says it to Lightning
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    data = SpiralDataModule(num_samples=701, batch_size=batch_size)
    module = LitRecipe(data.recipe, data.settings, data.options)
    trainer = _trainer(max_epochs=2, devices=world_size, num_sanity_val_steps=2)
    trainer.fit(module, data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


REFUSED = [
    "--compile on",
    "--eval-every-steps 5",
    "--checkpoint-every-minutes 5",
    "--checkpoint-every-epochs 2",
    "--ema 0.9",
]


def test_what_lightning_cannot_do_is_refused_before_anything_is_written(tmp_path, refused):
    path = tmp_path / "run"
    text = TINY.replace("Recipe(", "Recipe(loss_terms=lambda batch: len(batch[0]), ")
    recipe = tiny.write_recipe(tmp_path, text)
    for target, flag in (*(("spiral", flag) for flag in REFUSED), (str(recipe), "")):
        message = refused("train", target, *flag.split(), *LIGHTNING, "--run-dir", str(path))
        assert (flag or "loss_terms") in message
        assert "--engine native" in message
        assert not path.exists()


# The same two groups, each with a factor of its own.
GROUPED = OWN.replace("(step, total)", "(step, total, *, epoch)").replace(
    "return 1 - step / total", "return [1 - step / total, 1 / (1 + epoch)]"
)


@pytest.mark.parametrize(
    ("more", "flags"), [(OWN, ()), (GROUPED, ()), (BRANCHES, ("--find-unused",))]
)
def test_a_recipes_own_optimizer_or_branches_train_as_in_the_native_loop(tmp_path, more, flags):
    recipe = tiny.write_recipe(tmp_path, TINY + more)
    ours, theirs = with_both(tmp_path, recipe, *flags, "--epochs", "2", world_size=2)
    tiny.assert_same_training(ours, theirs, TOLERANCE)


def execute(folder: Path, program: str) -> tuple[int, str]:
    """Run a program in a process that has imported Lightning; return its code and its output."""
    ranks = start_ranks(_execute, 1, folder / "out", program, folder)
    (code,) = ranks.wait()
    return code, ranks.output()


def _execute(program: str, folder: Path) -> None:
    import os

    os.chdir(folder)
    exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize(
    ("ends", "named"),
    [("max_epochs=1", "accumulate_grad_batches=4"), ("max_time='00:00:01:00'", "max_steps")],
)
def test_a_trainer_that_accumulates_otherwise_or_has_no_end_is_told(tmp_path, ends, named):
    program = (
        "import lightning.pytorch as pl, samestep as s\n"
        "settings = s.Settings(epochs=1, micro_batch_size=8, batch_size=32)\n"
        f"pl.Trainer({ends}, logger=False, accelerator='cpu').fit("
        "s.LitRecipe('spiral', settings), s.LitData('spiral', settings))"
    )
    code, printed = execute(tmp_path, program)
    assert code == 1
    assert named in printed


def test_data_that_was_fitted_or_measured_before_takes_the_numbers_of_the_next_trainer(tmp_path):
    program = (
        "import lightning.pytorch as pl, samestep as s, samestep.lightning\n"
        "def trainer(**more): return pl.Trainer(logger=False, enable_checkpointing=False,"
        " enable_progress_bar=False, accelerator='cpu', **more)\n"
        "data = s.lightning.SpiralDataModule(num_samples=200)\n"
        "module = s.LitRecipe(data.recipe, data.settings, data.options)\n"
        "trainer().validate(module, data)\n"
        "trainer(max_epochs=1).fit(module, data)\n"
        "first = data.plan.total_steps\n"
        "again = trainer(max_epochs=3, accumulate_grad_batches=2)\n"
        "again.fit(module, data)\n"
        "print(first, data.plan.accumulate, data.plan.total_steps, again.global_step)"
    )
    code, printed = execute(tmp_path, program)
    assert code == 0, printed
    assert printed.splitlines()[-1] == "5 2 15 15"  # of 140 samples in batches of 32


def test_a_data_module_can_be_looked_at_without_a_trainer(tmp_path):
    program = (
        "import samestep as s, samestep.lightning\n"
        "data = s.lightning.SpiralDataModule(num_samples=200, batch_size=8)\n"
        "data.setup('fit')\n"
        "inputs, targets, *_ = next(iter(data.train_dataloader()))\n"
        "print(*inputs.shape, *targets.shape)"
    )
    code, printed = execute(tmp_path, program)
    assert code == 0, printed
    assert printed.split() == ["8", "2", "8"]


def test_without_lightning_the_extra_is_named_and_the_native_engine_never_needs_it(tmp_path):
    program = (
        "import sys\n"
        "from samestep.cli import main\n"
        "train = ['train', 'spiral', '--epochs', '1', '--num-samples', '200']\n"
        "assert main(train) == 0\n"
        "assert 'lightning' not in sys.modules\n"
        "sys.modules['lightning'] = None  # as if it were not installed\n"
        "assert main(train) == 0\n"
        "sys.exit(main([*train, '--engine', 'lightning']))"
    )
    done = in_python(tmp_path, program)
    assert done.returncode == 2, done.stderr
    assert "pip install 'samestep[lightning]'" in done.stderr
    assert done.stderr.count("samestep: ") == 1


def in_python(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
