"""Some samples of a split as they are stored, and what the model says of them, on one rank."""

import atexit
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from signal import Signals
from threading import Thread
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep.base.errors import UserError, no_exit
from samestep.base.run.pictures import FOLDER, Album, replace_pictures
from samestep.base.run.records import Record
from samestep.core.data.keyed_random import mix, seed_reading
from samestep.core.data.recipe_data import is_stream, open_split
from samestep.core.learner.apply import applied
from samestep.core.learner.device import data_dtype
from samestep.core.recipe import Recipe, Splits, is_cross_entropy
from samestep.core.session.drawing import (
    SampleSubset,
    draw_own,
    is_image,
    keep_images,
    keep_points,
    keep_rows,
    title_of,
)
from samestep.core.session.prediction import shown_by
from samestep.core.training.evaluation import as_evaluated, evaluation_batch, outputs_of
from samestep.core.training.stopping import Agreement
from samestep.core.training.work import Work
from samestep.launch.ranks.world import World

_MOST_PER_BATCH = 64
"""A slow model is asked about few samples at once."""
_LIMIT_S = 10.0
"""How long the other ranks, and the end of the run, wait for all pictures."""
_READ_S, _ASK_S = 2.0, 2.0
_NUM_IMAGES, _NUM_POINTS, _NUM_ROWS = 512, 2000, 20
_PREDICTIONS = "predictions"
"""The name of the pictures of predictions, of whichever kind."""


def _some_of(data: Any, count: int, seed: int) -> SampleSubset:
    """Return random samples of a split, so that sorted data shows all of its classes.

    It takes at most `count`, and stops reading after `_READ_S` seconds; one is always read.
    """
    until = time.monotonic() + _READ_S
    if type(data) is TensorDataset and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    total, places = None, list[int]()
    if not is_stream(data):
        total = len(data[0]) if isinstance(data, tuple) else len(data)
        places = random.Random(seed).sample(range(total), min(count, total))  # noqa: S311 - pictures
    if isinstance(data, tuple):
        inputs, targets = data
        places.sort()
        index = torch.tensor(places, device=inputs.device)
        there = inputs[index], targets[index.to(targets.device)]
        return SampleSubset(there, total, tuple(places))

    def read() -> Iterator[Any]:
        if total is None:
            seed_reading(mix(seed, 0))
            yield from islice(iter(data), count)
        for place in places:
            seed_reading(mix(seed, 0, place))
            yield data[place]

    samples = []
    for sample in read():
        samples.append(sample)
        if time.monotonic() > until:
            break
    return SampleSubset(samples, total, tuple(places[: len(samples)]))


@dataclass(kw_only=True)
class PictureSource:
    """What pictures are made of."""

    recipe: Recipe
    """As the user wrote it."""
    work: Work
    splits: Splits
    load_best: Callable[[], str]
    """Loads the weights of the best checkpoint into the model, and names it."""
    checkpoint: str = ""
    """The one whose weights the model holds; empty until it was asked for."""
    marks: list[int] = field(default_factory=list)
    """How often each of its tensors had been written then."""

    def model(self) -> nn.Module:
        """Return the model without what trains it on many ranks, with the best weights.

        They are loaded again where a picture has changed them.
        """
        model = self.work.learner.model
        tensors = (*model.parameters(), *model.buffers())
        if not self.checkpoint or self.marks != [t._version for t in tensors]:  # noqa: SLF001
            self.checkpoint = self.load_best()
            self.marks = [t._version for t in tensors]  # noqa: SLF001
        return model.eval()

    @property
    def split(self) -> str | None:
        """The part of the data that is looked at."""
        there = (name for name in ("test", "validation") if getattr(self.splits, name) is not None)
        return next(there, None)

    def ask(self, some: SampleSubset) -> Iterator[tuple[Any, Any, int]]:
        """Yield outputs, targets (with `forward` the batch) and the number of samples, by batch."""
        until, work = time.monotonic() + _ASK_S, self.work
        settings, device = replace(work.settings, num_workers=0), work.world.device
        size = min(evaluation_batch(settings, work.plan.evaluated_at_once), _MOST_PER_BATCH)
        dtype = data_dtype(settings.precision)
        in_order = replace(self.recipe, carry=None)  # these samples do not follow each other
        source = open_split(some.data, World(device=device), in_order, settings, dtype)
        model = applied(self.model(), self.recipe)
        for batch in source.evaluation(size):
            outputs = outputs_of(model, batch.inputs, settings.precision, device)
            yield outputs, batch.targets, batch.samples
            if time.monotonic() > until:
                return


def picture_records(
    source: PictureSource, path: Path, step: int, agreement: Agreement
) -> list[Record]:
    """Draw the pictures of a run; return a record for each that trackers take, or that failed."""
    settings = source.work.settings
    if not settings.pictures or agreement.signum:
        return []
    album = _drawn(source, agreement, min(_LIMIT_S, settings.timeout_s / 2))
    try:
        replace_pictures(path, album, checkpoint=source.checkpoint, split=source.split)
    except UserError as error:
        return [{"event": "picture", "step": step, "name": FOLDER, "problem": str(error)}]
    records: list[Record] = []
    for entry in album.entries:
        name, title = entry["name"], entry["title"]
        record = {"event": "picture", "step": step, "name": name, "title": title}
        if entry["kind"] == "note":
            records.append({**record, "problem": entry["text"]})
        elif name in album.images:
            records.append({**record, "path": f"{FOLDER}/{album.images[name]}"})
    return records


_left: list[Thread] = []
"""Threads that still draw what no caller waits for any more."""


def end_while_drawing(signum: int) -> int:
    """Return a training's exit code: 0, or 128 + the signal that stopped it.

    While a picture is still being drawn, end with it at once: Python's usual end would meet the
    thread within PyTorch, and abort the process.
    """
    code = 128 + signum if signum else 0
    if any(thread.is_alive() for thread in _left):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@atexit.register
def _await_drawing() -> None:
    """Wait a while before a process of somebody else's ends, for the same reason."""
    for thread in _left:
        thread.join(_LIMIT_S)


def _drawn(source: PictureSource, agreement: Agreement, limit_s: float) -> Album:
    """Make all pictures in a thread; wait for it until the limit or a stop signal."""
    album, plan = Album(), _planned(source)
    waiting = [name for name, _ in plan]

    def draw() -> None:
        with torch.no_grad():  # it is of each thread
            for name, make in plan:
                make(album)
                waiting.remove(name)

    with as_evaluated(source.work.learner.model, source.work.settings.seed):
        thread = Thread(target=draw, daemon=True, name="samestep-pictures")
        deadline = time.monotonic() + limit_s
        thread.start()
        while thread.is_alive() and not agreement.signum and time.monotonic() < deadline:
            thread.join(0.05)  # signals reach this thread
    if thread.is_alive():
        _left.append(thread)
        album = album.copy()  # what it still makes comes too late
        why = f"It was not drawn within {limit_s:.0f} s"
        if agreement.signum:
            why = f"{Signals(agreement.signum).name} came before it was drawn"
        for name in list(waiting):
            album.note(name, title_of(name), f"{why}.")
    return album


def _planned(source: PictureSource) -> list[tuple[str, Callable[[Album], None]]]:
    """Return the functions that draw the pictures, by name."""

    def predictions(album: Album) -> None:
        try:
            with no_exit():
                _add_predictions(source, album)
        except Exception as error:  # whatever the recipe's code raises: the run is whole
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            album.note(_PREDICTIONS, title_of(_PREDICTIONS), f"{kind}{error}")

    def own(album: Album, name: str) -> None:
        draw_own(source.recipe, source.model, source.splits, album, name)

    plan = [(name, partial(own, name=name)) for name in source.recipe.pictures]
    return [(_PREDICTIONS, predictions), *plan] if source.split is not None else [*plan]


def _add_predictions(source: PictureSource, album: Album) -> None:
    """Keep what is fitting of predictions: rows of `show`, images, points, or nothing."""
    recipe, classes, seed = source.recipe, source.splits.classes, source.work.settings.seed
    if recipe.forward is not None and recipe.show is None:
        return  # only the recipe knows what is in its batches
    data = getattr(source.splits, str(source.split))
    few = _some_of(data, _NUM_ROWS, seed)
    if not len(few):
        return
    if recipe.show is not None:
        rows: list[dict[str, Any]] = []
        for outputs, targets, count in source.ask(few):
            rows += shown_by(recipe.show, outputs, targets, count)
        keep_rows(album, few, rows, classes)
    kind = _kind(recipe, source.splits, few[0])
    if kind is None:
        return
    some = _some_of(data, _NUM_IMAGES if kind == "images" else _NUM_POINTS, seed)
    pairs: list[tuple[Tensor, Tensor]] = []
    for *pair, count in source.ask(some):
        if not all(isinstance(t, Tensor) and t.dim() and len(t) == count for t in pair):
            return  # no plain tensors
        pairs.append((pair[0].detach().cpu(), pair[1].detach().cpu()))
    if not pairs:
        return
    outputs, targets = map(torch.cat, zip(*pairs, strict=True))
    if kind == "images":
        keep_images(album, some, (outputs, targets), classes)
    else:
        keep_points(album, some, (outputs, targets))


def _kind(recipe: Recipe, splits: Splits, sample: Any) -> Literal["images", "points"] | None:
    """Return the kind of picture that can show stored samples like this one."""
    if recipe.forward is not None or not isinstance(sample, tuple) or len(sample) != 2:
        return None
    stored, target = sample
    has_classes = bool(splits.classes) or is_cross_entropy(recipe.evaluated_loss)
    if has_classes:
        return "images" if is_image(stored) else None
    if isinstance(target, Tensor):
        return "points" if target.numel() == 1 and target.is_floating_point() else None
    return "points" if isinstance(target, float) else None  # NumPy's is one, too
