"""A training script that calls `fit` of Lightning's Trainer: its module and data, as a recipe."""

import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from lightning import pytorch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from samestep.base.errors import UserError
from samestep.base.patches import Patch, patched_when_imported
from samestep.bridges.lightning.brought import recipe
from samestep.bridges.lightning.trainer_arguments import (
    callbacks_of,
    called_callbacks,
    clip_value,
    followed,
    num_ranks,
    settings_of_trainer,
)
from samestep.core.recipe import Recipe, Splits
from samestep.core.taken_over import TrainingReached, note_on_the_rest, until_training

_BY_ITSELF: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
"""What a Trainer is made with that will not train: it looks for no GPU and no other rank."""
_OTHERS = ("strategy", "num_nodes", "precision", "sync_batchnorm", "plugins", "benchmark")
_SEED = "PL_GLOBAL_SEED"  # set by seed_everything
_SIZES = ("batch_size", "train_batch_size", "_batch_size")
_GUESSED = 32
"""Of a loader that is made by `setup`: another is refused once that is known."""
_LAST = (
    "The last step of an epoch is incomplete: samestep takes the mean over its samples. The "
    "Trainer would divide the sum of its batches' means by accumulate_grad_batches."
)


@contextmanager
def as_recipe(module: ModuleType, path: Path) -> Iterator[None]:
    """Run a script within this, as the main program: at its `fit()` it gets a `recipe`.

    Raises:
        UserError: it has come to its end without that, or the Trainer's arguments, the module or
            its data ask for what samestep does not do.
    """
    fits: list[Recipe] = []

    def made(original: Any, trainer: Any, *_: Any, **given: Any) -> None:
        known = inspect.signature(original).parameters
        usual = {name: known[name].default for name in given if name in known}
        unlike = {n: v for n, v in given.items() if n not in usual or v != usual[n]}
        vars(trainer)["_given"] = unlike
        own = {name: value for name, value in given.items() if name not in _OTHERS}
        with _quiet():  # about devices that it does not use
            original(trainer, **own | _BY_ITSELF | {"logger": DummyLogger()})
        trainer.strategy.world_size = num_ranks(unlike)  # rates may grow with it

    def fit(original: Any, trainer: Any, *arguments: Any, **named: Any) -> NoReturn:
        bound = inspect.signature(original).bind(trainer, *arguments, **named).arguments
        caller = sys._getframe(2)  # noqa: SLF001
        if ".tuner." in caller.f_globals["__name__"]:
            raise UserError(
                "samestep cannot run a Tuner, which trains to find a rate or a batch size.",
                remedy="Leave it out, and set the value that it found.",
            )
        rest = note_on_the_rest(trainer, caller, "fit()")
        fits.append(_recipe_of(trainer, bound, rest))
        raise TrainingReached

    def patches(package: Any) -> list[Patch]:
        kind = package.Trainer
        return [(kind, "__init__", made), (kind, "fit", fit)]

    before = os.environ.pop(_SEED, None)
    with (
        _restoring(before),
        patched_when_imported({"pytorch_lightning": patches}),
        until_training(module, path, patches(pytorch), "a Trainer's fit()") as arguments,
    ):
        yield
    if not fits:
        raise UserError(
            f"{path}, run with {arguments}, ended without calling fit() of Lightning's Trainer.",
            remedy=f"Give the arguments with which it trains, as in samestep train {path} -- fit; "
            "or end the file with: recipe = samestep.lightning.recipe(…)",
        )
    vars(module)["recipe"] = fits[0]


@contextmanager
def _restoring(seed: str | None) -> Iterator[None]:
    """Let no other script see the seed of this one."""
    try:
        yield
    finally:
        os.environ.pop(_SEED, None)
        if seed is not None:
            os.environ[_SEED] = seed


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _recipe_of(trainer: Any, bound: dict[str, Any], rest: tuple[str, ...]) -> Recipe:
    if bound.get("ckpt_path"):
        raise UserError(
            "trainer.fit(…, ckpt_path=…): samestep cannot resume from checkpoints of Lightning.",
            remedy="Leave it out. A run of samestep continues with: samestep train RUN --resume",
        )
    model, train = bound["model"], bound.get("train_dataloaders")
    data = bound.get("datamodule")
    if hasattr(train, "train_dataloader"):  # a datamodule in its place
        data, train = train, None
    if train is not None:
        data = {"train": train, "validation": bound.get("val_dataloaders")}
        data = {stage: loader for stage, loader in data.items() if loader is not None}
    given = train is not None, bound.get("val_dataloaders") is not None
    has_own = not _is_base(model.val_dataloader)
    if given == (False, True) or (given == (True, False) and has_own):
        raise UserError(
            f"fit() is given one of its loaders, and takes the other from {type(model).__name__}.",
            remedy="Pass both loaders to fit(), or neither.",
        )
    loader = _training_loader(model if data is None else data)
    arguments, size = vars(trainer)["_given"], _batch_size_of(loader)
    settings, ranks = settings_of_trainer(arguments, size), num_ranks(arguments)
    if isinstance(loader, DataLoader):
        settings["num_workers"] = loader.num_workers
        batches = loader.batch_sampler
        if type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler:
            settings["order"] = "sequential"
        if loader.drop_last and settings["batch_size"] == loader.batch_size:
            settings["drop_last"] = True
    if seed := os.environ.get(_SEED):
        settings["seed"] = int(seed)
    brought = recipe(model, data, **settings)
    callbacks, missed = called_callbacks(arguments)
    notes, own = (*_notes(arguments, settings), *missed, *rest), brought.data
    stand_in = cast("Any", own).__self__.trainer
    stand_in.script = arguments | {"loaders_batch": size}
    stand_in.clip_value = clip_value(arguments)
    stand_in.hooks_of, stand_in.callbacks = callbacks, [callback for callback, _ in callbacks]
    stand_in.world_size, stand_in.num_nodes = ranks, arguments.get("num_nodes") or 1
    stand_in.num_devices = ranks // stand_in.num_nodes

    def noting(options: Any) -> Splits:
        splits: Splits = own(options)
        several = arguments.get("accumulate_grad_batches") or 1
        last = stand_in.samples % (several * (stand_in.loaders_batch or size))
        told = (_LAST,) if several > 1 and last else ()
        return replace(splits, notes=(*splits.notes, *notes, *told))

    return replace(brought, data=noting)


def _training_loader(data: Any) -> Any:
    """Return the training loader, or what makes one in its own time: after its setup."""
    if isinstance(data, dict):
        return data["train"]
    hooks = (getattr(data, name) for name in ("setup", "prepare_data"))
    return data.train_dataloader() if all(map(_is_base, hooks)) else data


def _is_base(hook: Any) -> bool:
    """Whether a hook is that of Lightning's own base class."""
    return re.match(r"(pytorch_)?lightning\.(pytorch\.)?core\.", hook.__module__) is not None


def _batch_size_of(loader: Any) -> int:
    """Return the batch size of a training loader, or of what makes one."""
    if isinstance(loader, list | tuple | dict):
        return 1  # the recipe says that it takes one loader
    known = [getattr(loader, name, None) for name in _SIZES]
    known += [getattr(loader, "hparams", {}).get(name) for name in _SIZES]
    known.append(getattr(getattr(loader, "batch_sampler", None), "batch_size", None))
    return next((size for size in known if isinstance(size, int)), _GUESSED)


def _notes(given: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    notes = []
    if given.get("logger") not in (None, True, False):
        notes.append(
            "The Trainer's logger is not used. To send the records to a tracker, use --track."
        )
    if settings.get("precision") == "bf16" and str(given["precision"]).startswith("16"):
        notes.append("On a CPU the Trainer uses bf16 for 16-mixed, and so does this run.")
    for callback in callbacks_of(given):
        keeps = type(callback).__name__ == "ModelCheckpoint" and callback.monitor
        if keeps and followed(callback)["monitor"] != settings["monitor"]:
            notes.append(
                f"ModelCheckpoint(monitor={keeps!r}) is not used: the best checkpoint is the one "
                f"with the best {settings['monitor']}. To choose by another metric, use --monitor."
            )
    if (ranks := num_ranks(given)) > 1:
        batch = settings["batch_size"]
        notes.append(
            f"The batch is {batch} samples over all ranks, from the Trainer's {ranks} devices. The "
            "number of ranks that train is set by --nproc."
        )
    return notes
