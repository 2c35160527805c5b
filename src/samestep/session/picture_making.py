"""Some samples of a split as they are stored, and what the model says of them, on one rank."""

import atexit
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from signal import Signals
from threading import Thread
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep.data.batches import open_split
from samestep.data.keyed_random import mix
from samestep.data.loader_source import seed_reading
from samestep.data.stream_lanes import is_stream
from samestep.errors import UserError, no_exit
from samestep.ranks.world import World
from samestep.recipe import Recipe, Splits, is_cross_entropy
from samestep.reporting.drawing import (
    SampleSubset,
    draw_own,
    is_image,
    keep_images,
    keep_points,
    keep_rows,
    title_of,
)
from samestep.reporting.picture_files import FOLDER, Album, replace_pictures
from samestep.run.records import Record
from samestep.session.sample_rows import RowsOfFiles, shown_by
from samestep.settings import Settings
from samestep.training.apply import applied
from samestep.training.device import data_dtype
from samestep.training.evaluation import as_evaluated, evaluation_batch, outputs_of
from samestep.training.stopping import Agreement
from samestep.training.work import Work

_MOST_PER_BATCH = 64
"""A model that takes long is asked of few samples."""


def some_of(data: Any, count: int, seed: int, until: float) -> SampleSubset:
    """Return some samples of a split: by chance, so that sorted data shows all of its classes.

    Args:
        data: the split.
        count: how many to take at most.
        seed: of the choice; of what a data set draws, too.
        until: when to stop reading, by `time.monotonic`; one sample is always read.
    """
    if type(data) is TensorDataset and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    if is_stream(data):
        seed_reading(mix(seed, 0))
        samples = list(_until(islice(iter(data), count), until))
        return SampleSubset(RowsOfFiles(samples), None)
    total = len(data[0]) if isinstance(data, tuple) else len(data)
    places = random.Random(seed).sample(range(total), min(count, total))  # noqa: S311 - pictures
    if isinstance(data, tuple):
        inputs, targets = data
        places.sort()
        index = torch.tensor(places, device=inputs.device)
        return SampleSubset(
            (inputs[index], targets[index.to(targets.device)]), total, tuple(places)
        )

    def read() -> Iterator[Any]:
        for place in places:
            seed_reading(mix(seed, 0, place))
            yield data[place]

    samples = list(_until(read(), until))
    return SampleSubset(RowsOfFiles(samples), total, tuple(places[: len(samples)]))


def _until(samples: Iterator[Any], until: float) -> Iterator[Any]:
    for sample in samples:
        yield sample
        if time.monotonic() > until:
            return


def ask(
    model: torch.nn.Module,
    some: SampleSubset,
    recipe: Recipe,
    settings: Settings,
    device: torch.device,
    batch_size: int,
    until: float,
) -> Iterator[tuple[Any, Any, int]]:
    """Yield outputs, targets (with `forward` the batch) and their number, batch by batch.

    It ends after the batch that `until` lies in, by `time.monotonic`.
    """
    settings = replace(settings, num_workers=0)
    plain = replace(recipe, augment=None)
    world, dtype = World(device=device), data_dtype(settings.precision)
    source, takes = open_split(some.data, world, plain, settings, dtype), applied(model, recipe)
    for batch in source.evaluation(min(batch_size, _MOST_PER_BATCH)):
        yield (
            outputs_of(takes, batch.inputs, settings.precision, device),
            batch.targets,
            batch.samples,
        )
        if time.monotonic() > until:
            return


def ask_whole(asked: Iterator[tuple[Any, Any, int]]) -> tuple[Tensor, Tensor] | None:
    """Return outputs and targets of all batches on the CPU; None if they are no plain tensors."""
    outputs, targets = [], []
    for output, target, count in asked:
        both = (output, target)
        if not all(isinstance(one, Tensor) and one.dim() and len(one) == count for one in both):
            return None
        outputs.append(output.detach().cpu())
        targets.append(target.detach().cpu())
    return (torch.cat(outputs), torch.cat(targets)) if outputs else None


_LIMIT_S = 10.0
"""How long the other ranks, and the end of the run, wait for all pictures."""
_READ_S, _ASK_S = 2.0, 2.0
_NUM_IMAGES, _NUM_POINTS, _NUM_ROWS = 512, 2000, 20


@dataclass(kw_only=True)
class PictureSource:
    """What pictures are made of."""

    recipe: Recipe
    """As the user wrote it."""
    work: Work
    splits: Splits
    load_best: Callable[[], str]
    checkpoint: str = ""
    """The one whose weights the model holds; empty until it was asked for."""
    marks: tuple[int, ...] = ()
    """How often each of its tensors had been written then."""

    def model(self) -> nn.Module:
        """Return the model without what trains it on many ranks, with the best weights.

        They are loaded again where a picture has changed them.
        """
        model = self.work.learner.model
        if not self.checkpoint or self.marks != _written(model):
            self.checkpoint = self.load_best()
            self.marks = _written(model)
        return model.eval()

    @property
    def split(self) -> str | None:
        """The part of the data that is looked at."""
        there = (name for name in ("test", "validation") if getattr(self.splits, name) is not None)
        return next(there, None)


def _written(model: nn.Module) -> tuple[int, ...]:
    return tuple(t._version for t in (*model.parameters(), *model.buffers()))  # noqa: SLF001


def picture_records(
    recipe: Recipe,
    settings: Settings,
    work: Work,
    splits: Splits,
    path: Path,
    *,
    load_best: Callable[[], str],
    step: int,
    agreement: Agreement,
) -> list[Record]:
    """Make the pictures of a run, and return a record for each that trackers take, or has failed.

    Args:
        recipe: what it is that is drawn.
        settings: whether pictures are wanted.
        work: the model.
        splits: the data.
        path: the run directory.
        load_best: lets the model hold the weights of the best checkpoint, and names it; called
            before the model is asked, if it is at all.
        step: the last step of the training.
        agreement: tells of a signal, which ends it.
    """
    if not settings.pictures or agreement.signum:
        return []
    source = PictureSource(recipe=recipe, work=work, splits=splits, load_best=load_best)
    album = _drawn(source, agreement, min(_LIMIT_S, settings.timeout_s / 2))
    records: list[Record] = []
    try:
        replace_pictures(path, album, checkpoint=source.checkpoint, split=source.split)
    except UserError as error:
        return [{"event": "picture", "step": step, "name": FOLDER, "problem": str(error)}]
    for entry in album.entries:
        name, title = entry["name"], entry["title"]
        record = {"event": "picture", "step": step, "name": name}
        if entry["kind"] == "note":
            records.append({**record, "title": title, "problem": entry["text"]})
        elif name in album.images:
            file = f"{FOLDER}/{album.images[name]}"
            records.append({**record, "path": file, "title": title})
    return records


_left: list[Thread] = []
"""Threads that still draw what nobody waits for any more."""


def end_while_drawing(code: int) -> None:
    """End this process at once with an exit code if a picture is still being drawn; else return.

    Python's usual end would meet the thread within PyTorch, and abort the process.
    """
    if any(thread.is_alive() for thread in _left):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@atexit.register
def _await_drawing() -> None:
    """Wait a while before a process of somebody else's ends, for the same reason."""
    for thread in _left:
        thread.join(_LIMIT_S)


def _drawn(source: PictureSource, agreement: Agreement, limit_s: float) -> Album:
    """Make all pictures in a thread, which nobody waits for longer than they should."""
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


_LOOK = "predictions"
"""The name of the work that looks at predictions, whichever kind they are."""


def _planned(source: PictureSource) -> list[tuple[str, Callable[[Album], None]]]:
    """Return what is to be made, by name."""

    def look(album: Album) -> None:
        try:
            with no_exit():
                _look(source, album)
        except Exception as error:  # whatever the recipe's code raises: the run is whole
            told = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            album.note(_LOOK, title_of(_LOOK), told)

    def own(name: str) -> Callable[[Album], None]:
        return lambda album: draw_own(source.recipe, source.model, source.splits, album, name)

    looks = [(_LOOK, look)] if source.split is not None else []
    return looks + [(name, own(name)) for name in source.recipe.pictures]


def _look(source: PictureSource, album: Album) -> None:
    """Keep what is fitting of predictions: rows of `show`, images, points, or nothing."""
    recipe, seed = source.recipe, source.work.settings.seed
    if recipe.forward is not None and recipe.show is None:
        return  # what is in its batches, the recipe alone knows
    data = getattr(source.splits, str(source.split))
    few = some_of(data, _NUM_ROWS, seed, time.monotonic() + _READ_S)
    if not len(few):
        return
    if recipe.show is not None:
        rows: list[dict[str, Any]] = []
        for outputs, targets, count in _ask(source, few):
            rows += shown_by(recipe.show, outputs, targets, count)
        keep_rows(album, few, rows, source.splits.classes)
    kind = _kind(recipe, source.splits, few[0])
    if kind is None:
        return
    count = _NUM_IMAGES if kind == "images" else _NUM_POINTS
    some = some_of(data, count, seed, time.monotonic() + _READ_S)
    found = ask_whole(_ask(source, some))
    if found is not None and kind == "images":
        keep_images(album, some, found, source.splits.classes)
    elif found is not None:
        keep_points(album, some, found)


def _ask(source: PictureSource, some: SampleSubset) -> Iterator[tuple[Any, Any, int]]:
    work, settings = source.work, source.work.settings
    size, until = evaluation_batch(settings, work.plan.micro_batch_size), time.monotonic() + _ASK_S
    return ask(source.model(), some, source.recipe, settings, work.world.device, size, until)


def _kind(recipe: Recipe, splits: Splits, sample: Any) -> Literal["images", "points"] | None:
    """Return what a sample, as it is stored, can be shown as."""
    if recipe.forward is not None or not isinstance(sample, tuple) or len(sample) != 2:
        return None
    stored, target = sample
    has_classes = bool(splits.classes) or is_cross_entropy(recipe.loss)
    if has_classes:
        return "images" if is_image(stored) else None
    if isinstance(target, Tensor):
        return "points" if target.numel() == 1 and target.is_floating_point() else None
    return "points" if isinstance(target, float) else None  # NumPy's is one, too
