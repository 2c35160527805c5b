"""Values that do not change from job to job: `[slurm]` of samestep.toml."""

import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from samestep.errors import UserError
from samestep.slurm.options import JobOptions

FILE = "samestep.toml"


def profile_files(folder: Path, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the files that apply in a folder, the more general first.

    They are the one in the user's config folder, and the nearest in the folder or above it.
    """
    home = environment.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    user = Path(home) / "samestep" / FILE
    project = next((f for p in [folder, *folder.parents] if (f := p / FILE).is_file()), None)
    return [path for path in (user, project) if path is not None and path.is_file()]


def read_profile(paths: list[Path]) -> JobOptions:
    """Return the options that these files set; later ones win.

    Raises:
        UserError: a file is no TOML, or has an unknown or ill-typed key.
    """
    types = typing.get_type_hints(JobOptions, include_extras=False)
    values: dict[str, Any] = {}
    for path in paths:
        for key, value in _table(path).items():
            name = key.replace("-", "_")
            if name not in types:
                import difflib  # noqa: PLC0415

                valid = sorted(field.name for field in fields(JobOptions))
                close = difflib.get_close_matches(name, valid, n=1)
                hint = f"Did you mean {close[0]!r}? " if close else ""
                raise UserError(
                    f"{path}: [slurm] has no key {key!r}. {hint}The keys are: {', '.join(valid)}."
                )
            try:
                values[name] = msgspec.convert(value, types[name])
            except msgspec.ValidationError as error:
                raise UserError(f"{path}: [slurm] {key} = {value!r}: {error}.") from error
    return JobOptions(**values)


def _table(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no valid TOML: {error}.") from error
    unknown = sorted(document.keys() - {"slurm"})
    if unknown:
        raise UserError(f"{path} has no use for {unknown[0]!r}; its one table is [slurm].")
    table = document.get("slurm", {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: slurm must be a table: [slurm].")
    return table
