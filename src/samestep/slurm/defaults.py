"""Values below the flags: `[slurm]` of samestep.toml, or what a run's job asked for before."""

import json
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgspec

from samestep.errors import UserError, did_you_mean
from samestep.run.files import read_object, write_text
from samestep.slurm.options import ENVIRONMENTS, JobOptions

FILE = "samestep.toml"
OPTIONS = "job.json"
"""In a run directory: what its newest job asked for."""


class UncheckedOptions(JobOptions):
    """What a job asks of Slurm and how its ranks start."""

    def __post_init__(self) -> None:
        """Check nothing: what counts is what comes of all layers together."""


def defaults_files(folder: Path, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the user's file, and the nearest in a folder or above it, as far as they exist."""
    home = environment.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    user = Path(home) / "samestep" / FILE
    project = next((f for p in [folder, *folder.parents] if (f := p / FILE).is_file()), None)
    return [path for path in (user, project) if path is not None and path.is_file()]


def read_defaults(paths: list[Path]) -> UncheckedOptions:
    """Return what these files set: later ones win, and lists add up.

    Raises:
        UserError: a file is no TOML, or has an unknown or ill-typed key.
    """
    values: dict[str, Any] = {}
    for path in paths:
        layer = _layer(path)
        if any(name in layer for name in ENVIRONMENTS):
            values = {k: v for k, v in values.items() if k not in ENVIRONMENTS}
        for name, value in layer.items():
            values[name] = values.get(name, ()) + value if isinstance(value, tuple) else value
    return UncheckedOptions(**values)


def keep_options(run: Path, options: JobOptions) -> None:
    """Write down what a job asks for, so that the next job of its run asks for the same."""
    write_text(run / OPTIONS, json.dumps(asdict(options), indent=2) + "\n")


def kept_options(run: Path) -> UncheckedOptions | None:
    """Return what the job before asked for, but for the jobs it waited for; None if not known."""
    types = typing.get_type_hints(JobOptions)
    kept = read_object(run / OPTIONS)
    try:
        values = {k: _convert(k, v, types[k]) for k, v in kept.items() if k in types}
    except msgspec.ValidationError:
        return None
    return UncheckedOptions(**(values | {"after": ()})) if values else None


def apply_flags(
    defaults: UncheckedOptions, flags: UncheckedOptions, paths: list[Path]
) -> JobOptions:
    """Return the options that the defaults of some files make with the flags laid over them.

    Raises:
        UserError: it is not what a job can ask for.
    """
    values = {field.name: getattr(flags, field.name) for field in fields(JobOptions)}
    typed = [name for name in ENVIRONMENTS if values[name] != getattr(defaults, name)]
    if typed:  # another environment than the defaults' takes its place
        values |= {name: None for name in ENVIRONMENTS if name not in typed}
    try:
        return JobOptions(**values)
    except UserError as error:
        if not paths:
            raise
        files = ", ".join(map(str, paths))
        raise UserError(f"{error} (Values of {files} count here, too.)") from error


def _layer(path: Path) -> dict[str, Any]:
    """Return the values of one file, by the names of the options."""
    types = typing.get_type_hints(JobOptions)
    values: dict[str, Any] = {}
    for key, value in _table(path).items():
        name = key.replace("-", "_")
        if name not in types:
            raise UserError(
                f"{path}: [slurm] has no key {key!r}. {did_you_mean(name, types)}"
                f"The keys are: {', '.join(sorted(types))}."
            )
        try:
            values[name] = _convert(name, value, types[name])
        except msgspec.ValidationError as error:  # the value may be a secret
            raise UserError(f"{path}: [slurm] {key}: {error}.") from error
    for name in ("venv", "container"):
        place = values.get(name)
        if place and not place.startswith("~") and "://" not in place:
            values[name] = str(path.parent / place)
    return values


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Return a value as the type of its option; a number of nodes may stand without quotes."""
    if name == "nodes" and type(value) is int:
        value = str(value)
    return msgspec.convert(value, kind)


def _table(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no valid TOML: {error}.") from error
    if unknown := sorted(document.keys() - {"slurm"}):
        raise UserError(f"{path} has no use for {unknown[0]!r}; its one table is [slurm].")
    table = document.get("slurm", {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: slurm must be a table: [slurm].")
    return table
