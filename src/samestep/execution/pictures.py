"""The pictures of a run, made when it ends: by rank 0 alone, within some seconds.

Nothing that is recorded depends on them: the weights have their digest by then, and random numbers
go on afterwards as if there had been none.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from threading import Thread
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.errors import UserError, no_exit
from samestep.execution.image_tiles import is_image
from samestep.execution.own_pictures import draw_own, title_of
from samestep.execution.predictions import keep_images, keep_points, keep_rows
from samestep.execution.shown import shown_by
from samestep.execution.some_samples import Some, ask, ask_whole, some_of
from samestep.recipe import Recipe, Splits, is_cross_entropy
from samestep.run.pictures import FOLDER, Album, replace_pictures
from samestep.run.records import Record
from samestep.settings import Settings
from samestep.training.evaluation import as_evaluated, evaluation_batch
from samestep.training.stopping import Agreement
from samestep.training.work import Work

_LIMIT_S = 10.0
"""How long the other ranks, and the end of the run, wait for all pictures."""
_READ_S, _ASK_S = 2.0, 2.0
_NUM_IMAGES, _NUM_POINTS, _NUM_ROWS = 512, 2000, 20


@dataclass(kw_only=True)
class Sitting:
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
    sitting = Sitting(recipe=recipe, work=work, splits=splits, load_best=load_best)
    album = _drawn(sitting, agreement, min(_LIMIT_S, settings.timeout_s / 2))
    records: list[Record] = []
    try:
        replace_pictures(path, album, checkpoint=sitting.checkpoint, split=sitting.split)
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


def _drawn(sitting: Sitting, agreement: Agreement, limit_s: float) -> Album:
    """Make all pictures in a thread, which nobody waits for longer than they should."""
    album, plan = Album(), _planned(sitting)
    waiting = [name for name, _ in plan]

    def draw() -> None:
        with torch.no_grad():  # it is of each thread
            for name, make in plan:
                make(album)
                waiting.remove(name)

    with as_evaluated(sitting.work.learner.model, sitting.work.settings.seed):
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


def _planned(sitting: Sitting) -> list[tuple[str, Callable[[Album], None]]]:
    """Return what is to be made, by name."""

    def look(album: Album) -> None:
        try:
            with no_exit():
                _look(sitting, album)
        except Exception as error:  # whatever the recipe's code raises: the run is whole
            told = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            album.note(_LOOK, title_of(_LOOK), told)

    def own(name: str) -> Callable[[Album], None]:
        return lambda album: draw_own(sitting.recipe, sitting.model, sitting.splits, album, name)

    looks = [(_LOOK, look)] if sitting.split is not None else []
    return looks + [(name, own(name)) for name in sitting.recipe.pictures]


def _look(sitting: Sitting, album: Album) -> None:
    """Keep what is fitting of predictions: rows of `show`, images, points, or nothing."""
    recipe, seed = sitting.recipe, sitting.work.settings.seed
    if recipe.forward is not None and recipe.show is None:
        return  # what is in its batches, the recipe alone knows
    data = getattr(sitting.splits, str(sitting.split))
    few = some_of(data, _NUM_ROWS, seed, time.monotonic() + _READ_S)
    if not len(few):
        return
    if recipe.show is not None:
        rows: list[dict[str, Any]] = []
        for outputs, targets, count in _ask(sitting, few):
            rows += shown_by(recipe.show, outputs, targets, count)
        keep_rows(album, few, rows, sitting.splits.classes)
    kind = _kind(recipe, sitting.splits, few[0])
    if kind is None:
        return
    count = _NUM_IMAGES if kind == "images" else _NUM_POINTS
    some = some_of(data, count, seed, time.monotonic() + _READ_S)
    found = ask_whole(_ask(sitting, some))
    if found is not None and kind == "images":
        keep_images(album, some, found, sitting.splits.classes)
    elif found is not None:
        keep_points(album, some, found)


def _ask(sitting: Sitting, some: Some) -> Iterator[tuple[Any, Any, int]]:
    work, settings = sitting.work, sitting.work.settings
    size, until = evaluation_batch(settings, work.plan.micro_batch_size), time.monotonic() + _ASK_S
    return ask(sitting.model(), some, sitting.recipe, settings, work.world.device, size, until)


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
