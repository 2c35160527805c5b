"""Predict what is in files, or the samples of a split, with a checkpoint of a run."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from samestep.base.errors import UserError, blame, defined_at
from samestep.base.machine import usable_cores
from samestep.base.settings import Device, flag_name
from samestep.base.trees import describe, map_leaves, tree_leaves
from samestep.core.data.recipe_data import open_split
from samestep.core.learner.apply import applied
from samestep.core.learner.device import choose_threads, switched
from samestep.core.recipe import Recipe, is_cross_entropy
from samestep.core.session.trained_model import Split, TrainedModel, open_checkpoint, open_data
from samestep.core.training.evaluation import CarriedOn, as_evaluated, evaluation_batch, outputs_of
from samestep.launch.ranks.world import World

_ROWS_PER_BATCH = 32
_FIELDS = ("file", "split", "row", "classes", "problem")
"""Fields of a prediction, which `show` cannot name again."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of one row of a file or split, or why it could not be asked."""

    file: str = ""
    split: str = ""
    row: int | None = None
    """Which of the rows, from 1; None of a file that is a single one."""
    classes: tuple[tuple[str, float], ...] = ()
    """Class names with their probabilities, most probable first."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What else there is to show, by name: numbers, words, and lists and dicts of them."""
    problem: str | None = None
    """Why it could not be read."""


def open_predictions(
    path: Path,
    name: str = "best",
    *,
    files: Sequence[Path] = (),
    split: Split | None = None,
    top: int,
    device: Device = "auto",
    recipe: Recipe | None = None,
    data_dir: str | None = None,
    skip_bad: int | None = None,
) -> tuple[TrainedModel, Iterator[Prediction]]:
    """Return a checkpoint of a run as a model, and what it says of files or of a split.

    Raises:
        UserError: both are named, one is not there, or the recipe cannot read files.
    """
    if split not in (None, *get_args(Split)):
        raise UserError(f"There is no split {split!r}. Choose train, validation or test.")
    if split is not None and files:
        raise UserError(f"--split {split} and files ({files[0]}): use one or the other.")
    for flag, value in (("data_dir", data_dir), ("skip_bad", skip_bad)):
        if split is None and value is not None:
            raise UserError(f"--{flag_name(flag)} goes with --split.", flags=[flag])
    for file in files:
        if file.is_dir():
            raise UserError(f"{file} is a folder. Name the files in it: {file}/*")
        if not file.exists():
            raise UserError(f"There is no file {file}.")
    model = open_checkpoint(path, name, device=device, recipe=recipe)
    if split is not None:
        return model, predict_split(model, split, top=top, data_dir=data_dir, skip_bad=skip_bad)
    if model.recipe.read is None:
        raise UserError(
            f"Recipe {model.recipe.name} does not say how to read a file, so it cannot predict "
            "any: add Recipe(read=…), a function of the options and a path."
        )
    threads = choose_threads(model.settings.threads, model.model, len(usable_cores()), 1)
    torch.set_num_threads(threads)
    return model, predict_files(model, files, top=top)


def ask(opened: TrainedModel, samples: Sequence[Any]) -> tuple[Any, Any]:
    """Return the outputs for samples as `read` gives them, and their targets or batch.

    The batch is put together as in an evaluation. Targets are None where there are none.
    """
    recipe = opened.recipe
    without = [_is_pair(sample) and sample[1] is None for sample in samples]
    rows: Any = [(s[0], 0) if w else s for s, w in zip(samples, without, strict=True)]
    has_targets = recipe.forward is not None or not any(without)
    if recipe.collate is None and recipe.forward is None:
        has_targets = has_targets and all(map(_is_pair, rows))
        rows = rows if has_targets else [(s[0] if _is_pair(s) else s, 0) for s in rows]
    settings, device = replace(opened.settings, num_workers=0), opened.device
    source = open_split(rows, World(device=device), recipe, settings, opened.dtype)
    batch, model = source.peek(len(rows)), applied(opened.model, recipe)
    with as_evaluated(model, settings.seed), switched(settings, device):
        outputs = outputs_of(model, batch.inputs, settings.precision, device)
    return outputs, batch.targets if has_targets else None


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2


def predict_files(opened: TrainedModel, files: Sequence[Path], *, top: int) -> Iterator[Prediction]:
    """Yield a prediction for each row of each file, in order; broken rows are only named."""
    waiting = _rows(opened, files)
    while rows := list(islice(waiting, _ROWS_PER_BATCH)):
        samples = [sample for row, sample in rows if row.problem is None]
        few = len(samples)
        answers = iter(_described(opened, *ask(opened, samples), few, top) if samples else ())
        for row, _ in rows:
            yield row if row.problem is not None else replace(row, **next(answers))


def predict_split(
    opened: TrainedModel,
    split: Split,
    *,
    top: int,
    data_dir: str | None = None,
    skip_bad: int | None = None,
) -> Iterator[Prediction]:
    """Yield a model's prediction for each sample of a split, in the order of the data."""
    data = open_data(opened, split, data_dir=data_dir, skip_bad=skip_bad, virtual_ranks=False)
    opened, settings, device = data.model, data.model.settings, data.model.device
    model = applied(opened.model, opened.recipe)
    carried = CarriedOn(model)

    def as_read() -> Iterator[Prediction]:
        row = 0
        for batch in data.source.evaluation(evaluation_batch(settings)):
            with as_evaluated(model, settings.seed), switched(settings, device):
                outputs = carried.outputs_of(model, batch, settings.precision, device)
            answers = _described(opened, outputs, batch.targets, batch.samples, top)
            places = batch.places or range(row, row + batch.samples)
            for place, fields in zip(places, answers, strict=True):
                yield Prediction(split=split, row=place + 1, **fields)
            row += batch.samples

    # Where state is carried, the samples of a slot are read one after the other.
    in_order = opened.recipe.carry is None
    yield from as_read() if in_order else sorted(as_read(), key=lambda found: found.row or 0)


def _rows(opened: TrainedModel, files: Sequence[Path]) -> Iterator[tuple[Prediction, Any]]:
    """Yield the samples that the recipe reads, file by file, each with its place or problem."""
    read = opened.recipe.read
    assert read is not None
    for path in files:
        whole = Prediction(file=str(path))
        number = 0
        try:
            samples = read(path)
            if not isinstance(samples, list | Iterator | Dataset):
                yield whole, samples
                continue
            for number, (sample, problem) in enumerate(_samples(samples), 1):
                yield replace(whole, row=number, problem=problem), sample
        except (ValueError, OSError) as error:
            yield replace(whole, problem=str(error)), None
            continue
        except Exception as error:
            blame(f"The recipe's read failed with {path}", error, read)
        if not number:
            yield replace(whole, problem="there is no row in it"), None


def _samples(samples: Any) -> Iterator[tuple[Any, str | None]]:
    """Yield each sample, or why it cannot be read; after such a one an iterator is at its end."""
    if isinstance(samples, IterableDataset) or not hasattr(samples, "__len__"):
        try:
            yield from ((sample, None) for sample in samples)
        except (ValueError, OSError) as error:
            yield None, f"{str(error).rstrip('.')}. The rows after it were not read."
        return
    for index in range(len(samples)):
        sample, problem = None, None
        try:
            sample = samples[index]
        except (ValueError, OSError) as error:
            problem = str(error)
        yield sample, problem


def _described(
    opened: TrainedModel, outputs: Any, targets: Any, count: int, top: int
) -> list[dict[str, Any]]:
    """Return the fields of a prediction for each of the samples that a model has seen."""
    recipe = opened.recipe
    if recipe.show is not None:
        return [{"values": row} for row in shown_by(recipe.show, outputs, targets, count)]
    names = tuple(opened.content.get("classes") or ())
    has_targets = recipe.forward is None and _has_a_row_each(targets, count)
    actual = _rows_of("target", targets, count) if has_targets else [{}] * count
    # Where the loss is made of it, outputs are class scores whether classes have names or not.
    scores = _class_scores(outputs, names, top, numbered=is_cross_entropy(recipe.evaluated_loss))
    if scores is None:
        rows = zip(_rows_of("output", outputs, count), actual, strict=True)
        return [{"values": {**row, **its}} for row, its in rows]
    for its in actual:
        for key, value in its.items():  # a class by its name
            if isinstance(value, int) and 0 <= value < len(names):
                its[key] = names[value]
    return [{"classes": s, "values": its} for s, its in zip(scores, actual, strict=True)]


def check_draws(opened: TrainedModel) -> None:
    """Check that the recipe can draw what is predicted."""
    if opened.recipe.plot is None:
        raise UserError(
            f"--plot: recipe {opened.recipe.name} does not say what to draw: add Recipe(plot=…), a "
            "function of the options, the file, the rows and a figure."
        )


def draw(opened: TrainedModel, file: Path, rows: Sequence[Mapping[str, Any]], figure: Any) -> None:
    """Draw what was predicted of a file into a figure of matplotlib."""
    paint = opened.recipe.plot
    assert paint is not None
    try:
        paint(file, rows, figure)
    except Exception as error:
        blame(f"The recipe's plot failed with {file}", error, paint)


def as_table(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON has it."""
    of_split = {"split": prediction.split}
    table: dict[str, Any] = of_split if prediction.split else {"file": prediction.file}
    if prediction.row is not None:
        table["row"] = prediction.row
    if prediction.problem is not None:
        return {**table, "problem": prediction.problem}
    if prediction.classes:
        table["classes"] = [{"class": name, "probability": p} for name, p in prediction.classes]
    return {**table, **prediction.values}


def _class_scores(
    outputs: Any, classes: Sequence[str], top: int, *, numbered: bool
) -> list[tuple[tuple[str, float], ...]] | None:
    """Return the `top` most probable classes of each sample; None if outputs are not class scores.

    `numbered`: whether they are class scores even without names; then numbers are the names.
    """
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or not outputs.is_floating_point():
        return None
    width = outputs.shape[1]
    names = classes or (tuple(map(str, range(width))) if numbered else ())
    if len(names) != width:
        return None
    best = outputs.cpu().to(torch.float64).softmax(dim=1).topk(min(top, width))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple((names[k], p) for k, p in zip(*row, strict=True)) for row in rows]


def _rows_of(name: str, tree: Any, count: int) -> list[dict[str, Any]]:
    if not _has_a_row_each(tree, count):
        raise UserError(
            f"The model's outputs for {count} samples are {describe(tree)}, and predict shows one "
            "number or one row of numbers per sample. Say what to show: Recipe(show=…), a function "
            "(outputs, targets) → a dict for each sample; with forward, (outputs, batch)."
        )
    here = map_leaves(Tensor.cpu, tree)
    return [{name: _plain(map_leaves(itemgetter(place), here))} for place in range(count)]


def _has_a_row_each(tree: Any, count: int) -> bool:
    """Whether a tree has tensors with one number, or one row of numbers, for each sample."""
    leaves = tree_leaves(tree)
    return bool(leaves) and all(
        isinstance(leaf, Tensor) and leaf.dim() in (1, 2) and len(leaf) == count for leaf in leaves
    )


def shown_by(
    show: Callable[[Any, Any], Sequence[Mapping[str, Any]]], outputs: Any, targets: Any, count: int
) -> list[dict[str, Any]]:
    """Return the dict that the recipe's own `show` makes for each sample."""
    try:
        rows = list(show(outputs, targets))
    except Exception as error:
        blame(f"The recipe's show failed with outputs {describe(outputs)}", error, show)
    if len(rows) != count or not all(isinstance(row, Mapping) for row in rows):
        kinds = ", ".join(dict.fromkeys(type(row).__name__ for row in rows))
        raise UserError(
            f"The recipe's show{defined_at(show)} returned {len(rows)} values ({kinds}) for "
            f"{count} samples; it must return a dict for each."
        )
    for name in _FIELDS:
        if any(name in row for row in rows):
            raise UserError(
                f"The recipe's show{defined_at(show)} names a value {name!r}, which predict says "
                f"itself. Give it another name, such as 'own_{name}'."
            )
    return [{str(name): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; a number that is none becomes None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return _plain(value.item())
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) or value is None else str(value)
