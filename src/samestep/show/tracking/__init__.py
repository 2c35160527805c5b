"""Runs at Comet, MLflow, TensorBoard, Trackio and Weights & Biases, or at a tracker of your own.

Each is fed from the run directory by a process of its own, which the training never waits for. A
tracker is a module with three functions; this file has what they are given:

    start(run: TrackedRun) -> Started     open the run at the tracker: a new one, or as it was left
    record(client, entries) -> None       hand over what happened since, in its order
    finish(client, result) -> None        close it; on return everything has arrived

Each may raise or take its time.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Picture", "Scalar", "Started", "TrackedRecord", "TrackedResult", "TrackedRun"]

Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What `start` is given."""

    path: Path
    """The run directory."""
    folder: Path
    """Where this tracker may keep files: its own folder in the run directory, which is there."""
    id: str
    """32 hexadecimal digits, the same whenever this run is started; a tracker may take them."""
    known: str | None
    """What `Started.run` was last time; None at the first."""
    offline: bool
    """Whether to write files in `folder` and send nothing."""
    project: str
    name: str
    workspace: str | None
    tags: tuple[str, ...]
    settings: Mapping[str, Scalar]
    """The settings and the recipe's options, flat: `lr`, `options.hidden_dims`."""
    facts: Mapping[str, Scalar]
    """Versions, machine, ranks, sizes, flat: `versions.torch`, `world_size`, `parameters`."""
    started_at: float
    """When the training began, in seconds since the epoch."""
    timeout_s: float
    """How long `start` may take before it is given up."""
    pid: int | None
    """The training's process on this machine; None if the run has ended."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a client would send a run: what `find_server` of samestep's own trackers returns.

    It raises what the client says where that has no key, a malformed one, or is set to be offline.
    """

    address: str | None
    """What must answer before the tracker is started online; None if nothing has to."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What must not appear in any file."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """What `start` returns."""

    client: Any
    """Whatever `record` and `finish` need."""
    run: str | None = None
    """The tracker's own name of the run, given back as `TrackedRun.known` when it continues."""
    link: str | None = None
    """Where to look at the run; shown, and kept in the run directory."""
    lines: int | None = None
    """How many lines of events.jsonl the tracker says it has, where it can; it is believed."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image to show: a picture of the run, or the confusion matrix of its test."""

    name: str
    """Letters, digits, - and _."""
    title: str
    png: Callable[[], bytes | None] = field(compare=False)
    """Reads or draws the PNG file; None where it is gone, or matplotlib is not installed."""

    def image(self) -> Any:
        """Return it as Pillow's image; None where there is none, or Pillow is not installed."""
        try:
            from PIL import Image  # noqa: PLC0415 - not all trackers need it
        except ImportError:
            return None
        content = self.png()
        return None if content is None else Image.open(io.BytesIO(content))


@dataclass(frozen=True, kw_only=True)
class TrackedRecord:
    """What a record says, as a tracker takes it."""

    event: Literal[
        "step", "epoch", "validation", "test", "train", "checkpoint", "metrics", "picture", "system"
    ]
    """`metrics` are those of a script of the user's own, by the names that it gave them."""
    axis: Literal["step", "epoch"]
    """What its values are drawn over: epochs by epoch, all else by step."""
    step: int
    epoch: int | None
    time: float
    """When it was, in seconds since the epoch, by the seconds of training steps."""
    values: Mapping[str, float]
    """By names such as `train/loss`, `epoch/loss`, `validation/accuracy`, `system/cpu_percent`."""
    line: int
    """Its line in events.jsonl, from 0; -1 for `system`."""
    file: Path | None = None
    """The checkpoint, where checkpoints are sent."""
    picture: Picture | None = None
    """What a record of the event `picture` shows; it has no values."""

    @property
    def at(self) -> int:
        """Where on its axis it stands."""
        return self.epoch or 0 if self.axis == "epoch" else self.step


@dataclass(frozen=True, kw_only=True)
class TrackedResult:
    """How the run ended."""

    status: Literal["completed", "stopped", "failed", "killed"]
    """`stopped` continues with --resume; `killed` left no word."""
    values: Mapping[str, Scalar]
    """result.json, flat: `test.accuracy`, `best.value`, `steps`; without what `facts` have."""
