"""Which settings may change when a run is resumed.

A checkpoint keeps the text of its settings.toml. Other settings would make a resumed run another
training, so a difference is refused unless `--allow-change` names it.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from samestep.errors import UserError, did_you_mean
from samestep.recipe import Recipe
from samestep.settings import (
    Settings,
    as_table,
    flag_name,
    free_names,
    merge_layers,
    settings_of_run,
)

# These decide which samples a step takes, so no flag allows another value.
_OF_THE_ORDER = frozenset(
    ["seed", "drop_last", "batch_size", "batch_size_per_rank", "num_samples", "shuffle_buffer"]
)
_SIZES = ("batch_size", "micro_batch_size", "accumulate")
_FIXED = _OF_THE_ORDER | {"engine", "virtual_ranks"}

Change = tuple[Any, Any]
"""A value before, and the value now; None where it was not set."""


def parse_names(text: str | None, recipe: Recipe) -> tuple[str, ...]:
    """Return the settings and options that `--allow-change` names."""
    names = tuple(
        word.strip().removeprefix("--").replace("-", "_") for word in (text or "").split(",")
    )
    known = {*_names(recipe), "recipe"}
    for name in filter(None, names):
        if name in _FIXED & known:
            raise UserError(
                f"--allow-change {name}: it cannot change within a run. Start a new run from the "
                "settings of this one: name its directory, without --resume."
            )
        if name not in known:
            raise UserError(
                f"--allow-change {text}: there is no setting {name!r}. "
                f"{did_you_mean(name, known)}Name settings or options, with commas between them: "
                "--allow-change lr,weight_decay."
            )
    return tuple(filter(None, names))


def refused_change(name: str, change: Change, *, is_given: bool) -> UserError:
    """Return the error for a changed value; `is_given` by the call rather than by a file."""
    before, now = change
    value = "" if now is True else f" {_shown(now)}"
    what = f"--{flag_name(name)}{value}" if is_given else f"{name} = {_shown(now)} in the settings"
    begun = f"{what}: the run was begun with {_shown(before)}"
    if name in _FIXED:
        return UserError(
            f"{begun}. It cannot change within a run: leave it out, or start a new run without "
            "--resume."
        )
    return UserError(
        f"{begun}. When a run is resumed this would make it another training: leave it out, start "
        f"a new run without --resume, or insist with --allow-change {name}."
    )


def check_changes(
    made_with: str, now: str, recipe: Recipe, allowed: Iterable[str], where: str
) -> dict[str, Change]:
    """Return what --allow-change lets differ from the TOML that a checkpoint was made with."""
    options = {} if recipe.options is None else asdict(recipe.options())
    own = {name: value for name, value in options.items() if value is not None}
    defaults = _plain(as_table(Settings()) | own)
    # A setting may be newer than the file.
    before = defaults | _flat(settings_of_run(tomllib.loads(made_with)))
    after = defaults | _flat(tomllib.loads(now))
    free = free_names(Settings, recipe.options, virtual_ranks=before.get("virtual_ranks"))
    changes = differing(before, after, sorted(_names(recipe) - free - _OF_THE_ORDER))
    others = {name: change for name, change in changes.items() if name not in set(allowed)}
    if others:
        was = ", ".join(f"{name} = {_shown(old)}" for name, (old, _) in others.items())
        would = ", ".join(f"{name} = {_shown(new)}" for name, (_, new) in others.items())
        insist = f", or add --allow-change {','.join(changes)} to go on with the new one"
        raise UserError(
            f"{where} was made with {was}; the run would go on with {would}, from its "
            "settings.toml or the command. Write the old value back"
            f"{'' if _FIXED & others.keys() else insist}."
        )
    return changes


def differing(
    before: Mapping[str, Any], after: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Change]:
    """Return the values of these names that are not the same."""
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def with_sizes_of_run(
    merged: Mapping[str, object],
    of_run: Mapping[str, object],
    flags: Mapping[str, object],
    *,
    earlier: bool,
) -> dict[str, object]:
    """Return the settings of a repeated command with the batch sizes of the run that it resumes.

    Its flags may ask for other micro-steps. What an earlier version's command says counts per rank,
    for the ranks of then.
    """
    asked = () if earlier else _SIZES[:1] if of_run.get("virtual_ranks") is not None else _SIZES
    sizes = {name: of_run[name] for name in _SIZES if name in of_run}
    sizes = merge_layers(sizes, {name: flags[name] for name in asked if name in flags})
    others = {*_SIZES, "batch_size_per_rank"}
    return {k: v for k, v in merged.items() if k not in others} | sizes


def words_of(changes: Mapping[str, Change]) -> list[str]:
    """Return the changes for people, one each."""
    return [f"{k} from {_shown(old)} to {_shown(new)}" for k, (old, new) in changes.items()]


def _names(recipe: Recipe) -> set[str]:
    own = fields(recipe.options) if recipe.options is not None else ()
    return {field.name for field in (*fields(Settings), *own)}


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's values as TOML gives them back."""
    return {key: list(v) if isinstance(v, tuple) else v for key, v in table.items()}


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    return {**table, **table.get("options", {})}


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)
