"""`samestep.load`, `evaluate`, `predict` and `export`: use a checkpoint of a run."""

import os
from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import nn

from samestep.base.errors import UserError
from samestep.base.settings import Device
from samestep.core.session.prediction import as_table, check_files, open_predictor, predict_files
from samestep.core.session.trained_model import evaluate_run, open_checkpoint
from samestep.core.session.weights_file import write_weights
from samestep.shell.api.arguments import AnyPath, one_line_errors, path_of
from samestep.shell.api.call import AnyRecipe, as_in_fresh_process, given_recipe


@one_line_errors
def load(
    run: AnyPath, checkpoint: str = "best", *, recipe: AnyRecipe = None, device: Device = "cpu"
) -> nn.Module:
    """Return the model of a run with the weights of a checkpoint, in eval mode.

        model = samestep.load("runs/ID")
        with torch.no_grad():
            outputs = model(inputs)

    It is a plain `nn.Module`, built by the recipe's `model`, in the precision of the run. Apply the
    recipe's `transform` to stored inputs yourself. With `--ema` the weights are the average.

    Args:
        run: the run, or its directory.
        checkpoint: "best", "last", or a file name in its checkpoints/.
        recipe: the recipe or its file, if the run names no file or the file has changed.
        device: the device of the model.

    Raises:
        UserError: there is no such run or checkpoint, it does not fit the recipe, or the file of
            the recipe has changed since.
    """
    path = path_of(run, "run")
    _check_device(device)
    with as_in_fresh_process():
        given = given_recipe(recipe, run)
        return open_checkpoint(path, _name(checkpoint), device=device, recipe=given).model


@one_line_errors
def evaluate(
    run: AnyPath,
    checkpoint: str = "best",
    *,
    split: Literal["train", "validation", "test"] = "test",
    recipe: AnyRecipe = None,
    device: Device = "auto",
    data_dir: AnyPath | None = None,
    skip_bad: int | None = None,
) -> dict[str, Any]:
    """Return loss and metrics of a checkpoint over a split, as `samestep evaluate --json` has them.

    Args:
        run: the run, or its directory.
        checkpoint: "best", "last", or a file name in its checkpoints/.
        split: the part of the data.
        recipe: the recipe or its file, if the run names no file or the file has changed.
        device: where to evaluate; "auto" takes the best device here.
        data_dir: the folder of the data, if it has moved since the training.
        skip_bad: how many of its files may be unreadable, for a recipe that has this option.

    Raises:
        UserError: there is no such run, checkpoint or split, or the checkpoint does not fit.
    """
    if split not in ("train", "validation", "test"):
        raise UserError(f"split={split!r}: it must be 'train', 'validation' or 'test'.")
    _check_device(device)
    with as_in_fresh_process():
        return evaluate_run(
            path_of(run, "run"),
            _name(checkpoint),
            split=split,
            device=device,
            data_dir=None if data_dir is None else str(path_of(data_dir, "data_dir")),
            skip_bad=skip_bad,
            given=given_recipe(recipe, run),
        )


@one_line_errors
def predict(
    run: AnyPath,
    files: AnyPath | Iterable[AnyPath],
    checkpoint: str = "best",
    *,
    top: int = 5,
    recipe: AnyRecipe = None,
    device: Device = "auto",
) -> list[dict[str, Any]]:
    """Return a checkpoint's predictions for files: a dict per file, or per row of a file.

    Each is what `samestep predict --json` prints: `file`, `row` if a file has several, and
    `classes` with their probabilities, or the values that the recipe shows; `problem` for a file
    that cannot be read.

    Args:
        run: the run, or its directory.
        files: one file or several.
        checkpoint: "best", "last", or a file name in its checkpoints/.
        top: how many classes to name.
        recipe: the recipe or its file, if the run names no file or the file has changed.
        device: where to compute; "auto" takes the best device here.

    Raises:
        UserError: there is no such run, checkpoint or file, or the recipe does not say how to read
            a file.
    """
    if not isinstance(files, Iterable | os.PathLike):
        raise UserError(f"files is of type {type(files).__name__}; name one file or several.")
    named = [files] if isinstance(files, str | os.PathLike) else files
    paths = [path_of(one, "a file") for one in named]
    _check_device(device)
    if not paths:
        raise UserError("files is empty; name one or more.")
    if not isinstance(top, int) or top < 1:
        raise UserError(f"top={top!r}: it must be 1 or more.")
    check_files(paths)
    with as_in_fresh_process():
        path = path_of(run, "run")
        given = given_recipe(recipe, run)
        found = open_predictor(path, _name(checkpoint), device=device, given=given)
        return [as_table(one) for one in predict_files(found, paths, top=top)]


@one_line_errors
def export(
    run: AnyPath, file: AnyPath, checkpoint: str = "best", *, force: bool = False
) -> dict[str, Any]:
    """Write the weights that an evaluation uses into a file that other programs read.

    With `--ema` they are the average. The recipe is not needed. Of a run of `open_run` they are the
    modules of its state; if there are several, a weight's name begins with that of its module.

    Args:
        run: the run, or its directory.
        file: its name ends in .safetensors, or in .pt or .pth for a `state_dict` by torch.save.
        checkpoint: "best", "last", or a file name in its checkpoints/.
        force: whether a file that is there is overwritten.

    Returns:
        A dict: `file`, `checkpoint`, `step`, the number of `tensors`, `bytes`, and `left_out`: the
        names of what a safetensors file cannot hold, since it is not a tensor.

    Raises:
        UserError: there is no such run or checkpoint, the file is there already or has another
            ending, or safetensors is not installed.
    """
    path = path_of(run, "run")
    return write_weights(path, path_of(file, "file"), _name(checkpoint), force=force)


def _name(checkpoint: Any) -> str:
    """Return a checkpoint's file name, of a name or a path."""
    return path_of(checkpoint, "checkpoint").name


def _check_device(device: str) -> None:
    if device not in get_args(Device):
        raise UserError(f"device={device!r}: it must be one of {', '.join(get_args(Device))}.")
