"""Values by the types that settings and options declare, wherever they come from.

A TOML file, a call in Python and a recipe's `complete` go through the same converter, which also
reads a run's settings.toml.
"""

import os
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from samestep.base.errors import UserError, defined_at, did_you_mean
from samestep.base.flags import of_type
from samestep.base.run.files import toml_of, yaml_of
from samestep.base.settings import ALSO_ACCEPTED, Settings, canonical_names, merge_layers
from samestep.core.recipe import Recipe
from samestep.core.recipes import RECIPES

SCRIPT_ARGS = "script_args"
"""In settings.toml, the arguments of a script that builds a Trainer."""


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings and options in a file, by field name.

    A file whose name ends in .yaml or .yml is YAML 1.2, of which samestep[yaml] reads only plain
    values: `1e-3` is a number and `off` a word. All others are TOML.
    """
    table = yaml_of(path) if path.suffix in (".yaml", ".yml") else toml_of(path)
    options = table.pop("options", {})
    if not isinstance(options, dict):
        raise UserError(f"{path}: [options] must be a table of the recipe's options.")
    return {key.replace("-", "_"): value for key, value in {**table, **options}.items()}


def known_of_run(run: Path) -> tuple[Settings, list[str]] | None:
    """Return a run's settings and the names of its recipe's options, and run no code of its.

    None where the recipe is one of samestep's own, or the run names none.
    """
    file = run / "settings.toml"
    table = read_config(file)
    if table.pop("recipe", None) in (*RECIPES, None):
        return None
    table.pop(SCRIPT_ARGS, None)
    names = {f.name for f in fields(Settings)} | ALSO_ACCEPTED
    types = _field_types(Settings)
    named = canonical_names({k: v for k, v in table.items() if k in names}, file).items()
    ours = {key: of_type(value, types[key], f"{file}: {key} = {value!r}") for key, value in named}
    return Settings(**merge_layers(ours)), [k for k in table if k not in names]  # type: ignore[arg-type]


def typed(
    table: Mapping[str, Any], recipe: Recipe, where: Path | str
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the settings and the recipe's options of a table, each of its declared type."""
    types, own = _field_types(Settings), _field_types(recipe.options) if recipe.options else {}
    ours: dict[str, object] = {}
    theirs: dict[str, object] = {}
    for key, value in canonical_names(table, where).items():
        if key not in types and key not in own:
            options = f" The options of {recipe.name}: {', '.join(own)}." if own else ""
            raise UserError(
                f"{where}: unknown setting {key!r}. {did_you_mean(key, [*types, *own])}"
                f"The settings: {', '.join(sorted(types))}.{options}"
            )
        home, kind = (ours, types[key]) if key in types else (theirs, own[key])
        home[key] = of_type(value, kind, f"{where}: {key} = {value!r}")
    return ours, theirs


def checked_settings(values: Mapping[str, Any], call: str) -> dict[str, Any]:
    """Return arguments of a call, named like settings, after the checks of the flags.

    Raises:
        UserError: one is of another type than the setting, or out of its range.
    """
    types = _field_types(Settings)
    settings = {
        name: of_type(plain_value(value), types[name], f"{call}({name}={value!r})")
        for name, value in values.items()
    }
    try:
        Settings(**settings)
    except UserError as error:
        name = next(iter(error.flags), "")
        must = error.what.partition("; ")[2] or error.what
        raise UserError(f"{call}({name}={values.get(name)!r}): {must}") from error
    return settings


def kept_options(recipe: Recipe, options: Any, *, completed: bool = False) -> Any:
    """Return a recipe's options as the run's settings.toml will give them back.

    `completed` if its `complete` has returned them.

    Raises:
        UserError: they would not come back, or not of their types.
    """
    if recipe.options is None:
        return options
    by = f"The recipe's complete(){defined_at(recipe.complete)} returned"
    who = by if completed else "The recipe has"
    if not (is_dataclass(options) and isinstance(options, recipe.options)):
        raise UserError(
            f"{by} {options!r:.80}.",
            remedy=f"Return an object of {recipe.options.__name__}: dataclasses.replace(options, "
            "NAME=…).",
        )
    own = {f.name: getattr(options, f.name) for f in fields(options)}
    types = _field_types(recipe.options)
    for name, value in options_table(options).items():
        subject = f"{who} the option {name} = {own[name]!r:.80}"
        try:
            read_back = tomllib.loads(tomli_w.dumps({name: value}).encode().decode())[name]
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{subject}, a {type(own[name]).__name__}, which settings.toml cannot hold.",
                remedy="Make it a number, a text, or a list of them, such as str(path).",
            ) from error
        own[name] = of_type(read_back, types[name], subject)
    return recipe.make_options(**own)


def options_table(options: Any) -> dict[str, Any]:
    """Return a recipe's options, but those that are None, as a TOML table."""
    table = asdict(options)
    return {name: plain_value(value) for name, value in table.items() if value is not None}


def plain_value(value: Any) -> Any:
    """Return a path as text, and a number of NumPy or PyTorch as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    is_array = type(value).__module__.partition(".")[0] in ("numpy", "torch")
    if is_array and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


@cache  # a loop asks in each epoch
def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def words_of(
    given: Sequence[str], tables: Sequence[Mapping[str, Any]], run: Path | None
) -> Sequence[str]:
    """Return the arguments of a script that builds a Trainer: those given, or of its settings."""
    if given and run is not None:
        raise UserError(f"{run} has the arguments of its script. Leave out what follows `--`.")
    words = given or next((table[SCRIPT_ARGS] for table in tables if SCRIPT_ARGS in table), ())
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{SCRIPT_ARGS} = {words!r:.80}: it must be a list of texts.")
    return words


def check_words(before: Sequence[str], now: Sequence[str], run: str) -> None:
    """Refuse other arguments of a script than those with which its run began."""
    if before != now:
        raise UserError(
            f"The script of {run} was given {' '.join(before) or 'no arguments'} and now "
            f"{' '.join(now) or 'none'}. Give the same after `--`, or choose another --run-dir."
        )
