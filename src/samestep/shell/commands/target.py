"""Parsing for the verbs that train: a target, then flags of the verb, the settings and the recipe.

The recipe, a run and a TOML file give the defaults; tyro puts the flags on top.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import tyro
from tyro.conf import Suppress

from samestep.base.errors import AlreadyTold, UserError, known_elsewhere
from samestep.base.run.directory import is_run
from samestep.base.settings import (
    ALSO_ACCEPTED,
    MERGED,
    OTHER_NAMES,
    Settings,
    flag_name,
    own_names,
)
from samestep.core.recipes import RECIPES
from samestep.launch.ranks.process import TASK
from samestep.shell.commands.help import (
    HELP,
    HELP_ALL,
    example_text,
    examples,
    help_text,
    parse_words,
)

if TYPE_CHECKING:
    from samestep.core.session.request import Request


def with_value(arguments: list[str], flag: str, form: str, default: str) -> list[str]:
    """Return the arguments with a value for a flag that may stand without one."""
    found = list[str]()
    for word, after in zip(arguments, [*arguments, ""][1:], strict=True):
        found.append(word)
        if word == flag and not re.fullmatch(form, after):
            found.append(default)
    return found


def parse_target(
    verb: str,
    about: str,
    kind: type,
    arguments: list[str],
    *lines: str,
    settings: type[Settings] = Settings,
    no_effect: Collection[str] = (),
) -> "tuple[Any, Request]":
    """Parse a target and the flags after it into the verb's own flags (`kind`) and a request.

    `about` is the help's first lines, with {} for the target; `lines` are its examples. `no_effect`
    names the settings that the verb itself decides.
    """
    if not arguments or arguments[0] in HELP:
        text = (
            f"{about.format('TARGET')}\n\nTARGET is a recipe ({', '.join(RECIPES)}), a recipe file "
            "(my_recipe.py), or the directory of a run. "
            f"`samestep {verb} TARGET --help` shows its own defaults and options."
        )
        whole, forms = HELP_ALL in arguments, {verb: kind(), "settings": settings()}
        shown = help_text(f"{verb} TARGET", text, forms, no_effect, whole=whole)
        sys.stdout.write(f"{shown}\n{example_text(*lines)}")
        raise AlreadyTold(0 if arguments else 2)
    from samestep.core.session.request import draft, finish, known_of_run, own_recipe  # noqa: PLC0415 - it imports torch

    target, *flags = own_flags(arguments)
    if target.startswith("-"):
        raise UserError(
            f"Name what to {verb} before {target}: a recipe ({', '.join(RECIPES)}), a "
            "recipe file, or the directory of a run."
        )
    if target in RECIPES:
        lines = tuple(line.replace("spiral", target) for line in lines)
    # What a recipe prints must not come before a verb's JSON object. Ranks print to a log.
    asks_help, is_rank = HELP & set(flags), TASK in os.environ
    quiet = hasattr(kind, "json") and not asks_help and not is_rank
    with examples(*lines), redirect_stdout(sys.stderr if quiet else sys.stdout):
        config = value_of("--config", flags)
        recipe = None
        if "--recipe-of-run" in flags and hasattr(kind, "recipe_of_run"):
            if "--resume" not in flags:
                raise UserError(
                    "--recipe-of-run has no effect without --resume.", flags=["recipe_of_run"]
                )
            recipe = own_recipe(target, value_of("--run-dir", flags))
        # A run may be a stranger's: its help runs no code of it.
        of_run = asks_help and target not in RECIPES and is_run(Path(target))
        if of_run and (told := known_of_run(Path(target))):
            below = settings(**vars(told[0]))
            named = ", ".join(f"--{flag_name(name)}" for name in told[1])
            about = about.format(target) + f" Its recipe's flags: {named}." * bool(named)
            titles = {verb: kind(), "settings": below}
            _show_help(verb, target, about, titles, no_effect, whole=HELP_ALL in flags)
        start = draft(target, Path(config) if config else None, recipe)
        below = settings(**vars(start.settings()))
        options = start.options()
        parts = {"command": kind(), "settings": below, "recipe": _options_form(kind, options)}
        given = names_given(flags)
        about = about.format(start.recipe.name)
        if asks_help:
            titles = {verb: kind(), f"options of {target}": parts["recipe"], "settings": below}
            groups = {title: part for title, part in titles.items() if part is not None}
            _show_help(verb, target, about, groups, no_effect, whole=HELP_ALL in flags)
        parts = {key: part for key, part in parts.items() if part is not None}
        known = {field.name for part in parts.values() for field in dataclasses.fields(part)}
        _check_names(verb, target, given, known, no_effect)
        types = [(key, type(part)) for key, part in parts.items()]
        form = dataclasses.make_dataclass("Form", types, frozen=True)
        parsed: Any = parse_words(
            form,
            flags,
            prog=f"samestep {verb} {target}",
            description=about,
            default=form(**parts),
            config=(tyro.conf.OmitArgPrefixes,),
        )
        if options is not None:
            found = parsed.recipe
            names = [field.name for field in dataclasses.fields(options)]
            options = type(options)(**{name: getattr(found, name) for name in names})
        request = finish(
            start,
            parsed.settings,
            options,
            given=given,
            resume=getattr(parsed.command, "resume", False),
            allow_change=getattr(parsed.command, "allow_change", None),
        )
    return parsed.command, request


def _show_help(
    verb: str,
    target: str,
    about: str,
    groups: dict[str, Any],
    no_effect: Collection[str],
    *,
    whole: bool,
) -> NoReturn:
    sys.stdout.write(help_text(f"{verb} {target}", about, groups, no_effect, whole=whole))
    sys.stdout.flush()  # the reader may have left, as `head` does
    raise SystemExit(0)


def _check_names(
    verb: str, target: str, given: set[str], known: set[str], no_effect: Collection[str]
) -> None:
    """Refuse flags that other tools have for a known one, and settings that the verb decides."""
    for name in sorted(given - known):
        if meant := known_elsewhere(name, known):
            raise UserError(
                f"--{flag_name(name)} is not a flag of samestep {verb} {target}: it is called "
                f"--{flag_name(meant)} here."
            )
    for name in sorted(given & set(no_effect)):
        raise UserError(
            f"--{flag_name(name)} has no effect on `samestep {verb}`, which chooses its own steps. "
            "Leave it out.",
            flags=[name],
        )


def _options_form(kind: type, options: Any) -> Any:
    """Return a recipe's options as tyro is to parse them.

    An option with the name of one of the verb's own flags gets no flag: a TOML file sets it. If the
    class checks itself, its errors name its line.
    """
    if options is None:
        return None
    shown = type(options)
    both = {own.name for own in dataclasses.fields(kind)}
    both &= {own.name for own in dataclasses.fields(options)}
    checks = getattr(shown, "__post_init__", None)
    if not both and checks is None:
        return options
    from samestep.core.recipe_checks import telling_options  # noqa: PLC0415 - it imports torch

    hints = get_type_hints(shown, include_extras=True)
    hidden = [
        (f.name, Annotated[hints[f.name], tyro.conf.arg(name=f"option-{f.name}"), Suppress], f)
        for f in dataclasses.fields(options)
        if f.name in both
    ]
    form = dataclasses.make_dataclass(
        shown.__name__,
        hidden,
        bases=(shown,),
        frozen=shown.__dataclass_params__.frozen,
        namespace={} if checks is None else {"__post_init__": telling_options(shown)(checks)},
    )
    return form(**{f.name: getattr(options, f.name) for f in dataclasses.fields(options)})


def value_of(name: str, flags: list[str]) -> str | None:
    """Return the value of a flag; the last one counts, as with every flag."""
    found = None
    for flag, following in itertools.pairwise([*flags, ""]):
        if flag == name and following:
            found = following
        if flag.startswith(f"{name}="):
            found = flag.removeprefix(f"{name}=")
    return found


def own_flags(arguments: list[str]) -> list[str]:
    """Replace settings under other names, as --global-batch-size or --eval-every, by the fields.

    Refuse two that set one field to different values; of a flag that is repeated the last counts.
    """
    of_units = (f.name for f in dataclasses.fields(Settings) if f.name.rpartition("_")[0] in MERGED)
    translated = {*ALSO_ACCEPTED, *OTHER_NAMES.values(), "monitor", "mode", *of_units}
    found: dict[str, Any] = {}
    places: dict[str, slice] = {}
    flags: list[str | None] = []
    waiting = [*arguments]
    while waiting:
        flag = waiting.pop(0)
        typed, equals, value = flag.partition("=")
        name = typed.removeprefix("--").replace("-", "_")
        if not typed.startswith("--") or name not in translated or not (equals or waiting):
            flags.append(flag)
            continue
        value = value if equals else waiting.pop(0)
        found[name] = _number_or_text(value)
        own = own_names({name: value}, "the command")
        before = places.get(name)
        if before and (before.stop - before.start > 2 or flags[before.start] != typed):
            flags[before] = [None] * (before.stop - before.start)
        words = [word for key, one in own.items() for word in (f"--{flag_name(key)}", str(one))]
        places[name] = slice(len(flags), len(flags) + len(words))
        flags += words
    own_names(found, "the command")
    return [word for word in flags if word is not None]


def _number_or_text(value: str) -> float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def names_given(flags: list[str]) -> set[str]:
    """Return the names of the settings and options among the flags."""
    names = {f.removeprefix("--").split("=")[0].replace("-", "_") for f in flags if f[:2] == "--"}
    return names | {name.removeprefix("no_") for name in names}
