"""A training loop of the user's own: `samestep.open_run`, with trackers if it asks for some."""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.run.directory import is_run
from samestep.base.run.records import Record
from samestep.base.run.store import address_of, check_address, check_mirror
from samestep.base.settings import Backend, Device, Settings, merge_layers
from samestep.base.tracker_choice import check_choice, check_installed, chosen
from samestep.core.loops.loop_session import Options
from samestep.core.loops.run import OwnRun
from samestep.core.session.declared import checked_settings


def open_run(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    may_change: Collection[str] = (),
    name: str | None = None,
    log_every: int | None = None,
    checkpoint_every_epochs: int = 1,
    checkpoint_every_steps: int | None = None,
    checkpoint_sync: bool = False,
    keep_newest: int | None = None,
    keep_hours: float | None = None,
    device: Device = "auto",
    backend: Backend = "auto",
    timeout_s: float = 600.0,
    stall_s: float | None = None,
    track: str | Mapping[str, Any] | None = None,
    mirror: str | None = None,
) -> OwnRun:
    """Return a run for a training loop of your own, on one rank or several.

    Open it by `with`; `OwnRun` has an example.

    Args:
        path: the run directory, which all nodes share; by default that of the job of `samestep
            slurm submit`, or a new one in runs/.
        seed: of the order, of the initial weights, and of all random numbers.
        resume: whether to continue the run that is there; where there is none, it begins.
        settings: the script's own, by name, kept with the run: numbers, texts, lists and dicts.
            Functions, types and devices are kept by their names; a value equal to `path` is left
            out. They must be the same on all ranks, as all arguments, except absolute paths,
            devices, and names such as threads, num_workers or local_rank.
        may_change: names of settings that may differ when the run continues, and between ranks.
        name: of the program, for `samestep compare`; by default that of the script.
        log_every: steps between two `step` records; by default the length decides: 200 to 500
            records, and in long runs one every 50 steps.
        checkpoint_every_epochs: epochs between two checkpoints; there is always one at the end.
        checkpoint_every_steps: steps between two checkpoints, besides those after epochs.
        checkpoint_sync: whether the training waits until each checkpoint is written.
        keep_newest: how many of the newest checkpoints are kept, besides the best; by default all.
        keep_hours: keep checkpoints for this many hours, besides the best and the last.
        device: where to train; "auto" takes the best device here.
        backend: what connects the ranks; "auto" chooses by platform and device.
        timeout_s: seconds that ranks wait for the slowest of them.
        stall_s: seconds without a step after which ranks count as hung, as `--stall-s`; 0: never.
        track: trackers that follow the run, as `--track`: "wandb,tensorboard"; or a dict with `to`
            and what flags call `--track-project`, `--track-tags` and so on: {"to": "wandb",
            "project": "mine"}.
        mirror: a store that the run is copied to, as `--mirror`.

    Raises:
        SystemExit: at the `with`; 2, after a message, for a mistake of the user; 128 + its number
            after a stop signal, with a checkpoint.
    """
    arguments, place = locals(), path and Path(path).absolute()
    del arguments["track"], arguments["mirror"]
    values: Any = {} if settings is None else settings
    texts = values.items() if isinstance(values, Mapping) else ()
    is_path = {n for n, v in texts if isinstance(v, str | Path) and Path(v).absolute() == place}
    if is_path:
        values = {name: value for name, value in values.items() if name not in is_path}
    own: dict[str, Any] = {"settings": values, "name": name or Path(sys.argv[0]).stem or "own_loop"}
    if not isinstance(may_change, str):
        own["may_change"] = {*may_change, *is_path}
    starts = [partial(_trackers, track, own["name"])] if track else []
    keeps = Settings(mirror=mirror, keep_newest=keep_newest, keep_hours=keep_hours)
    # On another machine, the run that is to continue may be in the store only.
    new = not resume or bool(place and not is_run(place))
    lost = (place or Path("runs/RUN")) if new else None
    starts += [partial(_mirror, keeps, lost)] if address_of(mirror) else []
    own["trackers"] = tuple(starts)
    return (OwnRun.opened_as or OwnRun)(Options(**{**arguments, **own}))


def _trackers(
    track: str | Mapping[str, Any],
    name: str,
    tell: Callable[[Record], None],
    stopped: Callable[[], bool],
) -> Any:
    """Return the trackers' processes, not yet started; rank 0 calls it."""
    from samestep.show.tracking.processes import TrackerProcesses  # noqa: PLC0415

    values = merge_layers({"track": track})
    names = {field.name for field in fields(Settings) if field.name.startswith("track")}
    if unknown := sorted(values.keys() - names):
        there = ", ".join(sorted(name.removeprefix("track_") for name in names - {"track"}))
        name = unknown[0].removeprefix("track_")
        raise UserError(f"open_run(track=…): {name!r} is not known; there are to, {there}.")
    settings = Settings(**checked_settings(values, "open_run"))
    check_choice(settings)
    check_installed(chosen(settings.track))
    return TrackerProcesses(settings, name, tell, stopped)


def _mirror(
    settings: Settings,
    lost: Path | None,
    tell: Callable[[Record], None],
    stopped: Callable[[], bool],
) -> Any:
    """Return the mirror that copies the run to a store; rank 0 calls it."""
    from samestep.show.mirroring import Mirror  # noqa: PLC0415

    check_address(str(settings.mirror))
    check_mirror(settings.mirror, new=lost is not None, lost=lost)
    return Mirror(settings, tell, stopped)
