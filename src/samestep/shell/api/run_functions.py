"""`samestep.load`, `evaluate`, `predict`, `export`, `runs` and `compare`: what to do with runs.

The verbs are made of these signatures and docstrings, so PyTorch is imported in the functions.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from samestep.base.errors import UserError
from samestep.base.flags import InShell
from samestep.base.settings import Device
from samestep.shell.api.arguments import (
    AnyPath,
    AnyRecipe,
    CheckpointName,
    FilePaths,
    Folder,
    RunPath,
    SeveralRuns,
    one_line_errors,
    path_of,
)
from samestep.show.reporting.run_table import Sort, as_json, read_runs, sorted_runs

if TYPE_CHECKING:
    from torch import nn


@one_line_errors
def load(
    run: RunPath,
    checkpoint: CheckpointName = "best",
    *,
    recipe: AnyRecipe = None,
    device: Device = "cpu",
    model: "nn.Module | None" = None,
    part: str | None = None,
) -> "nn.Module":
    """Return the model of a run with the weights of a checkpoint, in eval mode.

        model = samestep.load("runs/ID")
        with torch.no_grad():
            outputs = model(inputs)

    It is a plain `nn.Module`, built by the recipe's `model`, in the precision of the run. Apply the
    recipe's `transform` to stored inputs yourself. With `--ema` the weights are the average.

    Args:
        run: Directory of the run.
        checkpoint: `best`, `last`, or the name of a file in its checkpoints/.
        recipe: The recipe or its file, if the run names no file or the file has changed.
        device: The device of the model.
        model: A model to load the weights into, which needs no recipe: of a run of `open_run`,
            built as its script does. It keeps its precision.
        part: With `model`, whose weights these are among several modules in the run's state; by
            default those that fit.

    Raises:
        UserError: there is no such run or checkpoint, it does not fit the recipe or the model, or
            the file of the recipe has changed since.
    """
    if model is not None:
        from samestep.core.session.weights_file import load_into  # noqa: PLC0415
        from samestep.launch.ranks.world import choose_device  # noqa: PLC0415

        _check_device(device)
        loaded = load_into(model, path_of(run, "run"), _name(checkpoint), part=part)
        return loaded.to(choose_device(device, 0))
    from samestep.core.session.trained_model import open_checkpoint  # noqa: PLC0415 - it imports torch
    from samestep.shell.api.call import as_in_fresh_process, given_recipe  # noqa: PLC0415

    path = path_of(run, "run")
    _check_device(device)
    with as_in_fresh_process():
        chosen = given_recipe(recipe, run)
        return open_checkpoint(path, _name(checkpoint), device=device, recipe=chosen).model


@one_line_errors
def evaluate(
    run: RunPath,
    checkpoint: CheckpointName = "best",
    *,
    split: Literal["train", "validation", "test"] = "test",
    recipe: AnyRecipe = None,
    device: Device = "auto",
    data_dir: Folder = None,
    skip_bad: int | None = None,
) -> dict[str, Any]:
    """Return loss and metrics of a checkpoint over a split, as `samestep evaluate --json` has them.

    Args:
        run: Directory of the run.
        checkpoint: `best`, `last`, or the name of a file in its checkpoints/.
        split: Part of the data to evaluate.
        recipe: Recipe, or its file, to use if the run names no file or the file has changed; the
            run's own copy is recipe.py in its directory.
        device: Device to use; auto takes the best one of this machine.
        data_dir: Folder of the data, if it has moved since the training.
        skip_bad: How many files of the data may be unreadable, if the recipe has this option.

    Raises:
        UserError: there is no such run, checkpoint or split, or the checkpoint does not fit.
    """
    from samestep.core.session.trained_model import evaluate_run  # noqa: PLC0415 - it imports torch
    from samestep.shell.api.call import as_in_fresh_process, given_recipe  # noqa: PLC0415

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
    run: RunPath,
    files: FilePaths = (),
    checkpoint: CheckpointName = "best",
    *,
    split: Literal["train", "validation", "test"] | None = None,
    top: int = 5,
    recipe: AnyRecipe = None,
    device: Device = "auto",
    data_dir: Folder = None,
    skip_bad: int | None = None,
) -> list[dict[str, Any]]:
    """Return a checkpoint's predictions: a dict per file, or per row of a file or split.

    Each is what `samestep predict --json` prints: `file` or `split`, `row` if there are several,
    and `classes` with their probabilities, or the values that the recipe shows, with the target if
    it is known; `problem` for a file that cannot be read.

    Args:
        run: Directory of the run.
        files: Files to predict.
        checkpoint: `best`, `last`, or the name of a file in its checkpoints/.
        split: Part of the run's data to predict, in its order, instead of files.
        top: Number of classes to show for each file, or for each row of a file.
        recipe: Recipe, or its file, to use if the run names no file or the file has changed; the
            run's own copy is recipe.py in its directory.
        device: Device to use; auto takes the best one of this machine.
        data_dir: With `split`, folder of the data, if it has moved since the training.
        skip_bad: With `split`, how many files may be unreadable, if the recipe has this option.

    Raises:
        UserError: there is no such run, checkpoint, file or split, or the recipe cannot read files.
    """
    from samestep.core.session import prediction  # noqa: PLC0415 - it imports torch
    from samestep.shell.api.call import as_in_fresh_process, given_recipe  # noqa: PLC0415

    if not isinstance(files, Iterable | os.PathLike):
        raise UserError(f"files is of type {type(files).__name__}; pass one path or several.")
    named = [files] if isinstance(files, str | os.PathLike) else files
    paths = [path_of(file, "a file") for file in named]
    _check_device(device)
    if split is None and not paths:
        raise UserError("files is empty; pass one or more paths.")
    if not isinstance(top, int) or top < 1:
        raise UserError(f"top={top!r}: it must be 1 or more.")
    with as_in_fresh_process():
        path = path_of(run, "run")
        chosen = given_recipe(recipe, run)
        _, rows = prediction.open_predictions(
            path,
            _name(checkpoint),
            files=paths,
            split=split,
            top=top,
            device=device,
            recipe=chosen,
            data_dir=None if data_dir is None else str(path_of(data_dir, "data_dir")),
            skip_bad=skip_bad,
        )
        return [prediction.as_table(row) for row in rows]


@one_line_errors
def export(
    run: RunPath, file: AnyPath, checkpoint: CheckpointName = "best", *, force: bool = False
) -> dict[str, Any]:
    """Write the weights that an evaluation uses into a file that other programs read.

    With `--ema` they are the average. The recipe is not needed. Of a run of `open_run` they are the
    modules of its state; if there are several, a weight's name begins with that of its module.

    Args:
        run: Directory of the run.
        file: File to write. Its name ends in .safetensors (needs samestep[safetensors]), or in .pt
            or .pth for a `state_dict` by torch.save.
        checkpoint: `best`, `last`, or the name of a file in its checkpoints/.
        force: Overwrite the file if it exists.

    Returns:
        A dict: `file`, `checkpoint`, `step`, the number of `tensors`, `bytes`, and `left_out`: the
        names of what a safetensors file cannot hold, since it is not a tensor.

    Raises:
        UserError: there is no such run or checkpoint, the file is there already or has another
            ending, or safetensors is not installed.
    """
    from samestep.core.session.weights_file import write_weights  # noqa: PLC0415 - it imports torch

    return write_weights(path_of(run, "run"), path_of(file, "file"), _name(checkpoint), force=force)


def _name(checkpoint: Any) -> str:
    """Return a checkpoint's file name, of a name or a path."""
    return path_of(checkpoint, "checkpoint").name


def _check_device(device: str) -> None:
    if device not in get_args(Device):
        raise UserError(f"device={device!r}: it must be one of {', '.join(get_args(Device))}.")


@one_line_errors
def runs(
    folder: Annotated[AnyPath, InShell("FOLDER")] = "runs",
    *,
    sort: Sort = "date",
    recipe: str | None = None,
) -> list[dict[str, Any]]:
    """Return the runs in a folder, as `samestep runs --json` has them: a dict each.

    Args:
        folder: Folder that holds the runs; damaged ones are listed as damaged.
        sort: Order of the list. metric: best first; duration: longest first; date: newest first.
        recipe: List only the runs of this recipe.

    Raises:
        UserError: there is no such folder, or it is a run itself.
    """
    if sort not in get_args(Sort):
        raise UserError(f"sort={sort!r}: it must be one of {', '.join(get_args(Sort))}.")
    listed = [run for run in read_runs(path_of(folder, "folder")) if recipe in (None, run.recipe)]
    return [as_json(run) for run in sorted_runs(listed, sort)]


@one_line_errors
def compare(
    *runs: SeveralRuns,
    metric: str | None = None,
    target: float | None = None,
    any_recipe: bool = False,
) -> dict[str, Any]:
    """Return runs side by side, as `samestep compare --json` has them.

    `same_training` says for each run but the first whether its losses equal those of the first;
    `settings` has what differs, `by_samples` and `by_seconds` the curves.

    Args:
        runs: Directories of two or more runs. Running and damaged runs are read as far as possible.
        metric: Metric to compare: one of the validation set (loss, accuracy …), or train_loss; by
            default accuracy, else loss.
        target: Show when the metric first reached this value.
        any_recipe: Also compare runs of different recipes.

    Raises:
        UserError: one is not a run, or they have nothing in common.
    """
    from samestep.show.reporting.comparison import compare_runs  # noqa: PLC0415 - not for `runs`
    from samestep.show.reporting.comparison_text import as_table  # noqa: PLC0415

    paths = [path_of(run, "a run") for run in runs]
    return as_table(compare_runs(paths, metric, target, any_recipe=any_recipe))
