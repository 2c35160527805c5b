"""Predict what is in files with a checkpoint of a run, from its directory alone."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from samestep.data.batches import open_split
from samestep.data.trees import describe, map_leaves, tree_leaves
from samestep.errors import UserError, blame, defined_at
from samestep.machine import usable_cores
from samestep.ranks.world import World
from samestep.recipe import Recipe, is_cross_entropy
from samestep.session.trained_model import TrainedModel, open_checkpoint
from samestep.settings import Device
from samestep.training.apply import applied
from samestep.training.device import choose_threads, switched
from samestep.training.evaluation import as_evaluated, outputs_of

_ROWS_PER_BATCH = 32
_FIELDS = ("file", "row", "classes", "problem")
"""Fields of a prediction, which `show` cannot name again."""


class RowsOfFiles(Dataset[Any]):
    """Samples that `read` gave."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of one row of a file, or why it could not be asked."""

    file: str
    row: int | None = None
    """Which of the file's rows, from 1; None of a file that is a single one."""
    classes: tuple[tuple[str, float], ...] = ()
    """Class names with their probabilities, most probable first."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What else there is to show, by name: numbers, words, and lists and dicts of them."""
    problem: str | None = None
    """Why it could not be read."""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A checkpoint ready to be asked."""

    opened: TrainedModel
    recipe: Recipe
    """Without random augmentation."""
    classes: tuple[str, ...]
    """The names of the outputs, if the data has named them."""

    def ask(self, samples: Sequence[Any]) -> tuple[Any, Any]:
        """Return the outputs for samples as `read` gives them, and their targets or batch.

        The batch is put together as in an evaluation. Targets are None where there are none.
        """
        recipe, opened = self.recipe, self.opened
        without = [_is_pair(sample) and sample[1] is None for sample in samples]
        samples = [(s[0], 0) if w else s for s, w in zip(samples, without, strict=True)]
        known = recipe.forward is not None or not any(without)
        if recipe.collate is None and recipe.forward is None:
            known = known and all(map(_is_pair, samples))
            inputs = [sample[0] if _is_pair(sample) else sample for sample in samples]
            samples = samples if known else [(one, 0) for one in inputs]
        settings, device = replace(opened.settings, num_workers=0), opened.device
        rows = RowsOfFiles(samples)
        source = open_split(rows, World(device=device), recipe, settings, opened.dtype)
        batch, model = source.peek(len(samples)), applied(opened.model, recipe)
        with as_evaluated(model, settings.seed), switched(settings, device):
            outputs = outputs_of(model, batch.inputs, settings.precision, device)
        return outputs, batch.targets if known else None


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2


def open_predictor(
    path: Path, name: str = "best", *, device: Device = "auto", given: Recipe | None = None
) -> Predictor:
    """Return a checkpoint of a run, ready to be asked in this process; see `open_checkpoint`."""
    opened = open_checkpoint(path, name, device=device, recipe=given)
    recipe, settings, model = opened.recipe, opened.settings, opened.model
    if recipe.read is None:
        raise UserError(
            f"Recipe {recipe.name} does not say how to read a file, so it cannot predict any: "
            "give it Recipe(read=…), a function of the options and a path."
        )
    torch.set_num_threads(choose_threads(settings.threads, model, len(usable_cores()), 1))
    classes = tuple(opened.content.get("classes") or ())
    return Predictor(opened=opened, recipe=replace(recipe, augment=None), classes=classes)


def predict_files(predictor: Predictor, files: Sequence[Path], *, top: int) -> Iterator[Prediction]:
    """Yield what a model says of each row of each file, in order; what is broken is only named.

    `top` is how many classes to name for each row.
    """
    waiting: list[_Row] = []
    for row in _rows(predictor, files):
        waiting.append(row)
        if len(waiting) == _ROWS_PER_BATCH:
            yield from _predicted(predictor, waiting, top)
            waiting = []
    yield from _predicted(predictor, waiting, top)


class _Row(NamedTuple):
    """A sample of a file, or why there is none."""

    file: str
    number: int | None
    sample: Any = None
    problem: str | None = None


def _rows(predictor: Predictor, files: Sequence[Path]) -> Iterator[_Row]:
    """Yield what the recipe reads, file by file."""
    read = predictor.recipe.read
    assert read is not None
    for path in files:
        file, number = str(path), 0
        try:
            found = read(path)
            if not isinstance(found, list | Iterator | Dataset):
                yield _Row(file, None, found)
                continue
            for number, (sample, problem) in enumerate(_samples(found), 1):
                yield _Row(file, number, sample, problem)
        except (ValueError, OSError) as error:
            yield _Row(file, None, problem=str(error))
            continue
        except Exception as error:
            blame(f"The recipe's read failed with {file}", error, read)
        if not number:
            yield _Row(file, None, problem="there is no row in it")


def _samples(found: Any) -> Iterator[tuple[Any, str | None]]:
    """Yield each sample, or why it cannot be read; after such a one an iterator is at its end."""
    if isinstance(found, IterableDataset) or not hasattr(found, "__len__"):
        try:
            yield from ((sample, None) for sample in found)
        except (ValueError, OSError) as error:
            yield None, f"{str(error).rstrip('.')}. The rows after it were not read."
        return
    for index in range(len(found)):
        sample, problem = None, None
        try:
            sample = found[index]
        except (ValueError, OSError) as error:
            problem = str(error)
        yield sample, problem


def _predicted(predictor: Predictor, rows: Sequence[_Row], top: int) -> Iterator[Prediction]:
    """Yield what the model says of rows that are asked at once."""
    samples = [row.sample for row in rows if row.problem is None]
    said = iter(_said(predictor, samples, top) if samples else ())
    for row in rows:
        place: dict[str, Any] = {"file": row.file, "row": row.number}
        if row.problem is not None:
            yield Prediction(**place, problem=row.problem)
        else:
            yield Prediction(**place, **next(said))


def _said(predictor: Predictor, samples: Sequence[Any], top: int) -> list[dict[str, Any]]:
    """Return the fields of a prediction for each sample."""
    outputs, targets = predictor.ask(samples)
    recipe, classes, count = predictor.recipe, predictor.classes, len(samples)
    if recipe.show is not None:
        return [{"values": row} for row in shown_by(recipe.show, outputs, targets, count)]
    known = recipe.forward is None and fits(targets, count)
    actual = rows_of("target", targets, count) if known else [{}] * count
    # Where the loss is made of it, outputs are class scores whether classes have names or not.
    scores = class_scores(outputs, classes, top, numbered=is_cross_entropy(recipe.loss))
    if scores is None:
        rows = zip(rows_of("output", outputs, count), actual, strict=True)
        return [{"values": {**row, **its}} for row, its in rows]
    pairs = zip(scores, actual, strict=True)
    return [{"classes": found, "values": named(its, classes)} for found, its in pairs]


def check_draws(predictor: Predictor) -> None:
    """Check that the recipe can draw what is predicted."""
    if predictor.recipe.plot is None:
        raise UserError(
            f"--plot: recipe {predictor.recipe.name} does not say what to draw: give it "
            "Recipe(plot=…), a function of the options, the file, the rows and a figure."
        )


def draw(predictor: Predictor, file: Path, rows: Sequence[Mapping[str, Any]], figure: Any) -> None:
    """Draw what was predicted of a file into a figure of matplotlib."""
    paint = predictor.recipe.plot
    assert paint is not None
    try:
        paint(file, rows, figure)
    except Exception as error:
        blame(f"The recipe's plot failed with {file}", error, paint)


def check_files(files: Sequence[Path]) -> None:
    """Check that each is a file, before a model is loaded for them."""
    for file in files:
        if file.is_dir():
            raise UserError(f"{file} is a folder. Name the files in it: {file}/*")
        if not file.exists():
            raise UserError(f"There is no file {file}.")


def as_table(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON has it."""
    table: dict[str, Any] = {"file": prediction.file}
    if prediction.row is not None:
        table["row"] = prediction.row
    if prediction.problem is not None:
        return {**table, "problem": prediction.problem}
    if prediction.classes:
        table["classes"] = [{"class": name, "probability": p} for name, p in prediction.classes]
    return {**table, **prediction.values}


def class_scores(
    outputs: Any, classes: Sequence[str], top: int, *, numbered: bool
) -> list[tuple[tuple[str, float], ...]] | None:
    """Return the `top` most probable classes of each sample; None if outputs are no class scores.

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


def rows_of(name: str, tree: Any, count: int) -> list[dict[str, Any]]:
    """Return what each sample has of a tree of tensors, under a name."""
    if not fits(tree, count):
        raise UserError(
            f"The model's outputs for {count} samples are {describe(tree)}, and predict shows one "
            "number or one row of numbers a sample. Say what to show: Recipe(show=…), a function "
            "(outputs, targets) → a dict for each sample; with forward, (outputs, batch)."
        )
    here = map_leaves(Tensor.cpu, tree)
    return [{name: _plain(map_leaves(itemgetter(place), here))} for place in range(count)]


def fits(tree: Any, count: int) -> bool:
    """Whether a tree has tensors with one number, or one row of numbers, for each sample."""
    leaves = tree_leaves(tree)
    return bool(leaves) and all(
        isinstance(leaf, Tensor) and leaf.dim() in (1, 2) and len(leaf) == count for leaf in leaves
    )


def named(row: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return a sample's target with the name of its class in place of the number."""
    return {
        key: classes[value] if isinstance(value, int) and 0 <= value < len(classes) else value
        for key, value in row.items()
    }


def shown_by(
    show: Callable[[Any, Any], Sequence[Mapping[str, Any]]], outputs: Any, targets: Any, count: int
) -> list[dict[str, Any]]:
    """Return what the recipe's own `show` says of each sample."""
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
