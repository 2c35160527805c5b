"""`samestep.open_run`: what a run of a training loop that the user writes is opened with."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from samestep.ranks.world import Backend, Device
from samestep.session import own_directory as directory
from samestep.session import own_ending as ending
from samestep.session.own_run import OwnRun
from samestep.session.own_session import Wanted


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
    keep_checkpoints: int | None = None,
    device: Device = "auto",
    backend: Backend = "auto",
    timeout_s: float = 600.0,
) -> OwnRun:
    """Return a run for a training loop of one's own, alone or as one of the ranks of a launcher.

    Open it by `with`; `OwnRun` has an example.

    Args:
        path: the run directory, which all nodes share; by default that of the job of `samestep
            slurm submit`, or a new one in runs/.
        seed: of the order, of the initial weights, and of all random numbers.
        resume: whether to go on with the run that is there; where there is none, it begins.
        settings: the script's own, by name, kept with the run: numbers, texts, lists and dicts. A
            value equal to `path` is left out.
        may_change: names of those that may be others when the run goes on.
        name: of the program, for `samestep compare`; by default that of the script.
        log_every: steps between two `step` records; by default the length decides: 200 to 500
            records, and in long runs one every 50 steps.
        checkpoint_every_epochs: epochs between two checkpoints; there is always one at the end.
        checkpoint_every_steps: steps between two checkpoints, beside those after epochs.
        keep_checkpoints: how many of the newest are kept; by default all.
        device: where to train; "auto" takes the best device here.
        backend: what connects the ranks; "auto" chooses by platform and device.
        timeout_s: seconds that ranks wait for the slowest of them.

    Raises:
        SystemExit: at the `with`; 2, after a message, for a mistake of the user; 128 + its number
            after a stop signal, with a checkpoint.
    """
    is_path = directory.names_of_path(settings or {}, path)
    kept = {name: value for name, value in (settings or {}).items() if name not in is_path}
    wanted = Wanted(
        path=path,
        seed=seed,
        resume=resume,
        settings=directory.plain_settings(kept),
        may_change=may_change if isinstance(may_change, str) else {*may_change, *is_path},
        name=name or ending.script_name(),
        log_every=log_every,
        checkpoint_every_epochs=checkpoint_every_epochs,
        checkpoint_every_steps=checkpoint_every_steps,
        keep_checkpoints=keep_checkpoints,
        device=device,
        backend=backend,
        timeout_s=timeout_s,
    )
    return OwnRun(wanted)
