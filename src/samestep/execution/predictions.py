"""Pictures of what a model predicts: images right and wrong, points, rows of what `show` says."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.execution.image_tiles import png_of, sheet_of, tile_of
from samestep.execution.some_samples import Some
from samestep.run.pictures import Album, Entry

_NUM_SHOWN = 16
_MOST_TEXT = 400


def keep_images(
    album: Album, some: Some, found: tuple[Tensor, Tensor], classes: Sequence[str]
) -> None:
    """Keep images that were predicted right, and those most confidently wrong.

    Args:
        album: where to.
        some: the samples; the first of them were asked.
        found: outputs (samples, classes) and targets (samples,); if they are others, nothing is
            kept.
        classes: the names of the classes, if they have any.
    """
    outputs, targets = found
    fits = outputs.dim() == 2 and outputs.is_floating_point() and outputs.shape[1] > 1
    if not fits or targets.dim() != 1 or targets.is_floating_point() or targets.is_complex():
        return
    if classes and len(classes) != outputs.shape[1]:
        return
    names = list(classes) or [str(k) for k in range(outputs.shape[1])]
    sure, predicted = outputs.to(torch.float64).softmax(dim=1).max(dim=1)
    known = sure.isfinite() & (targets >= 0) & (targets < len(names))
    right = torch.nonzero(known & (predicted == targets)).flatten().tolist()
    wrong = torch.nonzero(known & (predicted != targets)).flatten().tolist()
    wrong.sort(key=lambda place: -float(sure[place]))
    files: dict[str, bytes] = {}
    tiles: dict[str, list[Tensor]] = {"right": [], "wrong": []}
    rows: dict[str, list[Entry]] = {"right": [], "wrong": []}
    for kind, places in (("right", right[:_NUM_SHOWN]), ("wrong", wrong[:_NUM_SHOWN])):
        for number, place in enumerate(places):
            tile, file = tile_of(some[place][0]), f"{kind}-{number:02}.png"
            tiles[kind].append(tile)
            files[file] = png_of(tile)
            said = {"predicted": names[predicted[place]], "probability": float(sure[place])}
            rows[kind].append({"file": file, "target": names[targets[place]], **said})
    if not files:
        return
    title = "Predictions: right, and most confidently wrong"
    image = "predictions.png"
    files[image] = sheet_of(tiles["right"], tiles["wrong"])
    album.add({"name": "predictions", "kind": "images", "title": title, **rows}, files, image)


def keep_points(album: Album, some: Some, found: tuple[Tensor, Tensor]) -> None:
    """Keep predicted against actual values, where there is one of each per sample."""
    outputs, targets = found
    actual, predicted = targets.flatten().to(torch.float64), outputs.flatten().to(torch.float64)
    if not outputs.is_floating_point() or len(actual) != len(targets) != 0:
        return
    if len(predicted) != len(outputs) or not _varies(actual):
        return
    points = [
        [float(f"{value:.6g}") for value in pair]
        for pair in zip(actual.tolist(), predicted.tolist(), strict=True)
    ]
    finite = [point for point in points if all(abs(value) < float("inf") for value in point)]
    if not finite:
        return
    entry = {"name": "regression", "kind": "points", "title": "Predicted against actual"}
    album.add({**entry, "points": finite, "of": len(points) if some.of is None else some.of})


def _varies(actual: Tensor) -> bool:
    """Whether targets are numbers to predict: those of two classes are 0 and 1 alone."""
    return not bool(((actual == 0) | (actual == 1)).all())


def keep_rows(
    album: Album, some: Some, rows: Sequence[dict[str, Any]], classes: Sequence[str]
) -> None:
    """Keep rows of what the recipe's `show` says, texts cut to what a reader looks at.

    Before it stands which sample it is, its text if it is stored as one, and its class.
    """
    if rows:
        whole = [{**_about(some, place, classes), **row} for place, row in enumerate(rows)]
        short = [{name: _short(value) for name, value in row.items()} for row in whole]
        album.add({"name": "samples", "kind": "rows", "title": "Samples", "rows": short})


def _about(some: Some, place: int, classes: Sequence[str]) -> dict[str, Any]:
    about: dict[str, Any] = {"sample": some.places[place]} if some.places else {}
    sample = some[place]
    stored, target = sample if isinstance(sample, tuple) and len(sample) == 2 else (sample, None)
    if isinstance(stored, str):
        about["text"] = stored
    elif isinstance(stored, dict):
        about |= {str(name): value for name, value in stored.items() if isinstance(value, str)}
    if isinstance(target, Tensor) and target.numel() == 1 and not target.is_floating_point():
        target = int(target)
    if type(target) is int and 0 <= target < len(classes):
        about["target"] = classes[target]
    return about


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return f"{value[: _MOST_TEXT - 1]}…"
    if isinstance(value, list):
        return [_short(part) for part in value[:100]]
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    return value
