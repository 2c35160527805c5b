"""What `open_run` is given: checked, and in the form that the run's files keep."""

import math
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.ranks.process import JOB_RUN
from samestep.run.directory import new_run_path
from samestep.run.environment import names_secret
from samestep.session.own_state import simple
from samestep.session.session import refuse_taken
from samestep.settings import Backend, Device


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `open_run`; see there."""

    path: str | Path | None
    seed: int
    resume: bool
    settings: Mapping[str, Any]
    may_change: Collection[str]
    name: str
    log_every: int | None
    checkpoint_every_epochs: int
    checkpoint_every_steps: int | None
    keep_newest: int | None
    device: Device
    backend: Backend
    timeout_s: float

    def check(self) -> None:
        """Refuse numbers that are out of range, and a text in place of a list."""
        names = ("log_every", "checkpoint_every_epochs", "checkpoint_every_steps")
        for name in (*names, "keep_newest"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"open_run({name}={value!r}): it must be a whole number from 1.")
        if isinstance(self.may_change, str):
            raise UserError(f"open_run(may_change={self.may_change!r}) must be a list of names.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UserError(f"open_run(seed={self.seed!r}): it must be a whole number from 0.")

    def choose_path(self) -> Path:
        """Return the directory of a run that is to begin or to go on."""
        path = Path(self.path or os.environ.get(JOB_RUN) or new_run_path(self.name))
        if not self.resume:
            refuse_taken(
                path, "Continue it with open_run(…, resume=True), or name another directory."
            )
        return path

    @property
    def is_unnamed(self) -> bool:
        """Whether the run's directory is a new one that samestep names."""
        return not self.path and not os.environ.get(JOB_RUN)

    def saves_after(self, epoch: int, step: int) -> bool:
        """Whether a checkpoint is due at the end of an epoch."""
        by_steps = self.checkpoint_every_steps
        return epoch % self.checkpoint_every_epochs == 0 or bool(by_steps and step % by_steps == 0)


def script_name() -> str:
    """Return the name of the running script, without its ending."""
    return Path(sys.argv[0]).stem or "own_loop"


def names_of_path(settings: Mapping[str, Any], path: str | Path | None) -> set[str]:
    """Return the names of settings that are the run directory, which may be moved."""
    place = path and Path(path).absolute()
    texts = {name: value for name, value in settings.items() if isinstance(value, str | Path)}
    return {name for name, value in texts.items() if Path(value).absolute() == place}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as TOML has them.

    Those that are None, that TOML cannot hold, or that are named like a secret are left out.
    """
    told = {str(name): value for name, value in settings.items() if not names_secret(str(name))}
    plain = {name: _plain(value) for name, value in told.items()}
    return {name: value for name, value in plain.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return None for other objects: their text may differ from process to process."""
    if isinstance(value, Mapping):
        return plain_settings(value)
    if isinstance(value, list | tuple):
        return [plain for part in value if (plain := _plain(part)) is not None]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # as a number, NaN differs from itself
    return str(value) if isinstance(value, Path) else simple(value)
