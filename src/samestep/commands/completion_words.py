"""What a shell can complete: verbs, their flags and values, what their targets are.

All of it is read from the dataclasses that the verbs parse with, so it follows them.
"""

import importlib
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tyro

from samestep.cli import VERBS
from samestep.commands import slurm
from samestep.commands.help import recipe_files
from samestep.commands.new import KINDS
from samestep.commands.settings_help import HELP_ALL, kind_of
from samestep.recipes import RECIPES
from samestep.settings import Settings, flag_name
from samestep.tracking.choice import PACKAGES

Target = Literal["recipe", "run", "runs", "files", "file", "folder", "none"]
"""What stands without a flag: a recipe, file or run; a run; runs; a run, then files; a file; …"""

_NAMED_FILES = ("dir", "config", "script", "plot", "out", "container", "venv")
_KNOWN_VALUES = {"checkpoint": ("best", "last"), "track": (*PACKAGES,), "to": (*PACKAGES,)}
"""Values of flags that take any text, where some are known."""

# verb → the module and the dataclass of its flags, and its target. With "+" it takes the settings,
# but for those that the module's tuple of that name has.
COMMANDS: dict[str, tuple[str, Target]] = {
    "demo": ("demo:Command", "none"),
    "train": ("train:Command+", "recipe"),
    "explain": ("explain:Command+", "recipe"),
    "evaluate": ("evaluate:Command", "run"),
    "predict": ("predict:Command", "files"),
    "track": ("track:Command", "run"),
    "profile": ("profile:Command+", "recipe"),
    "verify": ("verify:Command+NO_EFFECT", "recipe"),
    "runs": ("runs:Command", "folder"),
    "compare": ("compare:Command", "runs"),
    "report": ("report:Command", "runs"),
    "watch": ("watch:Command", "run"),
    "scale": ("scale:Command+_DECIDED", "recipe"),
    "doctor": ("doctor:_Doctor", "file"),
    "data get": ("data:_Get", "none"),
    "data list": ("data:_List", "none"),
    "slurm submit": ("slurm.submit:_Submit", "recipe"),
    "slurm status": ("slurm.status:_Status", "run"),
    "slurm logs": ("slurm.logs:_Logs", "run"),
    "slurm cancel": ("slurm.cancel:_Cancel", "run"),
}
_INNER = {
    "new": (*KINDS,),
    "slurm": (*slurm.VERBS,),
    "data": ("get", "list"),
    "slurm sandbox": ("up", "status", "down"),
    "completion": ("bash", "zsh", "fish"),
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a verb."""

    name: str
    """With its hyphens."""
    takes: Literal["nothing", "value", "file"]
    values: tuple[str, ...] = ()
    """Those that it may have, or some of them."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """All that there is to complete."""

    verbs: dict[str, str]
    """Each with what it does."""
    inner: dict[str, tuple[str, ...]]
    """Verb → the words that come next, of verbs that have such."""
    flags: dict[str, tuple[Flag, ...]]
    """Verb, with its inner one, → its flags."""
    targets: dict[str, Target]
    recipes: dict[str, tuple[Flag, ...]]
    """Recipe → the flags of its own options."""

    @property
    def of_recipes(self) -> tuple[str, ...]:
        """The verbs that take a recipe's own options, too."""
        return tuple(verb for verb, (place, _) in COMMANDS.items() if "+" in place)


def completion_words() -> Words:
    """Return what there is to complete. It imports every verb, and so torch."""
    return Words(
        verbs=VERBS,
        inner=_INNER,
        flags={verb: tuple(_of_verb(place)) for verb, (place, _) in COMMANDS.items()},
        targets={verb: target for verb, (_, target) in COMMANDS.items()},
        recipes={name: tuple(_of_recipe(name)) for name in recipe_files()},
    )


def _of_verb(place: str) -> Iterator[Flag]:
    """Yield the flags of a verb, its own before the settings of the same name."""
    name, plus, refused = place.partition("+")
    module_name, _, form = name.partition(":")
    module = importlib.import_module(f"samestep.commands.{module_name}")
    own = list(_flags(getattr(module, form)))
    taken = {flag.name for flag in own}
    taken |= {f"--{flag_name(name)}" for name in getattr(module, refused or "_", ())}
    settings = _flags(Settings) if plus else ()
    yield from (*own, *(flag for flag in settings if flag.name not in taken))
    yield Flag(name="--help", takes="nothing")
    if plus:
        yield Flag(name=HELP_ALL, takes="nothing")


def _of_recipe(name: str) -> Iterator[Flag]:
    recipe = importlib.import_module(RECIPES[name]).recipe
    if recipe.options is not None:
        yield from _flags(recipe.options)


def _flags(form: type) -> Iterator[Flag]:
    """Yield the flags that tyro makes of a dataclass."""
    hints = typing.get_type_hints(form, include_extras=True)
    for field in fields(form):
        extras = get_args(hints[field.name])[1:]
        hidden = (*get_args(tyro.conf.Positional[int]), *get_args(tyro.conf.Suppress[int]))
        if any(extra in hidden for extra in extras):
            continue
        name, kind = flag_name(field.name), kind_of(hints[field.name])
        if kind is bool:
            yield Flag(name=f"--{name}", takes="nothing")
            if field.default is True:
                yield Flag(name=f"--no-{name}", takes="nothing")
            continue
        values = _KNOWN_VALUES.get(field.name) or _choices(kind)
        is_file = kind is Path or any(part in _NAMED_FILES for part in field.name.split("_"))
        yield Flag(name=f"--{name}", takes="file" if is_file else "value", values=values)


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the words of a `Literal`, also where it stands beside a number."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(word for part in get_args(kind) for word in _choices(part))
