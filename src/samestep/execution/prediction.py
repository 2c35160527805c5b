"""Predict the classes of files with a checkpoint of a run, from its directory alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.execution.opening import open_checkpoint
from samestep.machine import usable_cores
from samestep.ranks.world import Device
from samestep.training.backends import switched
from samestep.training.precision import autocast
from samestep.training.threads import choose_threads

_FILES_PER_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of one file, or why it could not be asked."""

    file: str
    classes: tuple[tuple[str, float], ...] = ()
    """Class names with their probabilities, most probable first."""
    problem: str | None = None
    """Why the file could not be read."""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A checkpoint ready to be asked."""

    classes: tuple[str, ...]
    """The names of the outputs."""
    read: Callable[[Path], Tensor]
    """One file → one input as it is stored; `ValueError` says why it cannot be read."""
    probabilities: Callable[[Tensor], Tensor]
    """Stored inputs (batch, …) → (batch, classes), float64 on the CPU, each row adding up to 1."""


def open_predictor(path: Path, name: str = "best", *, device: Device = "auto") -> Predictor:
    """Return a checkpoint of a run, ready to be asked in this process.

    Args:
        path: the run's directory.
        name: "best", "last", or a file name in its checkpoints/.
        device: where to compute.

    Raises:
        UserError: there is no such run or checkpoint, or its recipe reads no files or names no
            classes.
    """
    opened = open_checkpoint(path, name, device=device)
    recipe, settings, model = opened.recipe, opened.settings, opened.model
    read, transform = recipe.read, recipe.transform
    if read is None:
        raise UserError(
            f"Recipe {recipe.name} does not say how to read a file, so it cannot predict any: "
            "give it Recipe(read=…), a function of the options and a path."
        )
    if recipe.forward is not None or recipe.collate is not None:
        raise UserError(
            f"Recipe {recipe.name} has a collate or forward of its own, and predict can only ask a "
            "model that takes a batch of equal inputs. Open the checkpoint in Python instead."
        )
    classes = tuple(opened.content.get("classes") or ())
    if not classes:
        raise UserError(
            f"{path / 'checkpoints' / opened.entry.path} names no classes: the recipe's data must "
            "return Splits(classes=…)."
        )
    torch.set_num_threads(choose_threads(settings.threads, model, len(usable_cores()), 1))

    def probabilities(inputs: Tensor) -> Tensor:
        inputs = inputs.to(opened.device)
        inputs = transform(inputs) if transform is not None else inputs
        autocasts = autocast(settings.precision, opened.device)
        with torch.no_grad(), switched(settings, opened.device), autocasts:
            if inputs.is_floating_point():
                inputs = inputs.to(opened.dtype)
            outputs: Tensor = model(inputs)
        return outputs.cpu().to(torch.float64).softmax(dim=1)

    return Predictor(
        classes=classes, read=lambda file: read(opened.options, file), probabilities=probabilities
    )


def predict_files(predictor: Predictor, files: Sequence[Path], *, top: int) -> Iterator[Prediction]:
    """Yield what a model says of each file, in their order; one that is broken is only named.

    Args:
        predictor: what `open_predictor` returned.
        files: what to look at; `check_files` says first whether they are there.
        top: how many classes to name for each file.
    """
    for start in range(0, len(files), _FILES_PER_BATCH):
        batch = files[start : start + _FILES_PER_BATCH]
        found = [_try_to_read(predictor, file) for file in batch]
        inputs = [what for what in found if isinstance(what, Tensor)]
        rows = iter(predictor.probabilities(torch.stack(inputs)) if inputs else ())
        for file, what in zip(batch, found, strict=True):
            if isinstance(what, str):
                yield Prediction(file=str(file), problem=what)
                continue
            best = next(rows).topk(min(top, len(predictor.classes)))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            yield Prediction(
                file=str(file), classes=tuple((predictor.classes[k], p) for k, p in pairs)
            )


def check_files(files: Sequence[Path]) -> None:
    """Check that each is a file, before a model is loaded for them.

    Raises:
        UserError: one is missing, or a folder.
    """
    for file in files:
        if file.is_dir():
            raise UserError(f"{file} is a folder. Name the files in it: {file}/*")
        if not file.exists():
            raise UserError(f"There is no file {file}.")


def _try_to_read(predictor: Predictor, file: Path) -> Tensor | str:
    try:
        return predictor.read(file)
    except (ValueError, OSError) as error:
        return str(error)


def as_table(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON has it."""
    if prediction.problem is not None:
        return {"file": prediction.file, "problem": prediction.problem}
    return {
        "file": prediction.file,
        "classes": [{"class": name, "probability": p} for name, p in prediction.classes],
    }
