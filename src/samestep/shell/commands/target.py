"""Parsing for the verbs with a target: one that trains, or any script.

What trains gives the defaults, with a file of settings: a recipe, or a run. Flags come on top:
those of the verb, the settings and the recipe's options. A script has words of its own, after `--`.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from samestep.base.errors import AlreadyTold, UserError, known_elsewhere
from samestep.base.flags import parse
from samestep.base.run.directory import is_run
from samestep.base.settings import (
    ALSO_ACCEPTED,
    MERGED,
    OTHER_NAMES,
    Settings,
    canonical_names,
    flag_name,
)
from samestep.core.recipes import RECIPES
from samestep.launch.ranks.process import TASK
from samestep.shell.cli import HELP, HELP_ALL, example_text, show
from samestep.shell.commands.forms import Form, flags_of, help_text

if TYPE_CHECKING:
    from samestep.core.session.request import Request


def cut_at_dashes(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first `--`, and those after it."""
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def with_value(arguments: list[str], flag: str, form: str, default: str) -> list[str]:
    """Return the arguments with a value for a flag that may stand without one."""
    words = list[str]()
    for word, after in itertools.pairwise([*arguments, ""]):
        words.append(word)
        if word == flag and not re.fullmatch(form, after):
            words.append(default)
    return words


def parse_target(form: Form, arguments: list[str]) -> "tuple[Any, Request]":
    """Parse a target and the flags after it into the verb's own flags and a request."""
    arguments, words = cut_at_dashes(arguments)
    if not arguments or arguments[0] in HELP:
        about = (
            f"\n\nTARGET is a recipe ({', '.join(RECIPES)}), a recipe file (my_recipe.py), or the "
            f"directory of a run. `samestep {form.verb} TARGET --help` shows its own defaults and "
            "options."
        )
        _show_help(form, "TARGET", about, {"settings": Settings()}, arguments)
    from samestep.core.session.declared import known_of_run  # noqa: PLC0415 - they import torch
    from samestep.core.session.request import draft, finish, recipe_copy_of  # noqa: PLC0415

    target, *flags = canonical_flags(target_first(arguments, form.kind))
    if target.startswith("-"):
        raise UserError(
            f"Name what to {form.verb} before {target}: a recipe ({', '.join(RECIPES)}), a "
            "recipe file, or the directory of a run."
        )
    # What a recipe prints must not come before a verb's JSON object. Ranks print to a log.
    asks_help, kind = HELP & {*flags}, form.kind
    quiet = hasattr(kind, "json") and not asks_help and TASK not in os.environ
    with redirect_stdout(sys.stderr if quiet else sys.stdout):
        config = value_of("--config", flags)
        recipe = None
        if "--recipe-of-run" in flags and hasattr(kind, "recipe_of_run"):
            if "--resume" not in flags:
                raise UserError("--recipe-of-run needs --resume.", flags=["recipe_of_run"])
            recipe = recipe_copy_of(target, value_of("--run-dir", flags))
        of_run = asks_help and target not in RECIPES and is_run(Path(target))
        # The run may be a stranger's, so no code of it runs.
        if of_run and (run_settings := known_of_run(Path(target))):
            below, names = run_settings
            more = f" Its recipe's flags: {', '.join(f'--{flag_name(name)}' for name in names)}."
            _show_help(form, target, more if names else "", {"settings": below}, flags)
        start = draft(target, Path(config) if config else None, recipe, words)
        options = start.options()
        if asks_help:
            own = {} if options is None else {f"options of {target}": options}
            _show_help(form, target, "", {**own, "settings": start.settings()}, flags)
        typed = names_given(flags)
        kinds = [kind, Settings, *([] if options is None else [type(options)])]
        _check_names(form, target, typed, kinds)
        own_values, settings, *others = parse(flags, f"samestep {form.verb} {target}", *kinds)
        command = kind(**own_values)
        if others:
            names = [field.name for field in dataclasses.fields(options)]
            values = {name: getattr(options, name) for name in names}
            options = start.recipe.make_options(**{**values, **others[0]})
        request = finish(
            start,
            settings,
            options,
            named=typed,
            resume=getattr(command, "resume", False),
            allow_change=getattr(command, "allow_change", None),
        )
    return command, request


def _show_help(
    form: Form, target: str, more: str, parts: dict[str, Any], words: list[str]
) -> NoReturn:
    name = f"{form.verb} {target}"
    shown = {form.verb: form.kind(), **parts}
    about = (form.kind.__doc__ or "").format(target) + more
    text = help_text(name, about, shown, form.no_effect, whole=HELP_ALL in words)
    of_target = target if target in RECIPES else "spiral"
    examples = (line.replace("spiral", of_target) for line in form.examples)
    show(f"{text}\n{example_text(*examples)}")
    raise AlreadyTold(0 if words else 2)


def _check_names(form: Form, target: str, typed: set[str], kinds: Iterable[type]) -> None:
    """Refuse flags that other tools have for a known one, and settings that the verb decides."""
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    for name in sorted(typed - names):
        if meant := known_elsewhere(name, names):
            raise UserError(
                f"--{flag_name(name)} is not a flag of samestep {form.verb} {target}: use "
                f"--{flag_name(meant)}."
            )
    for name in sorted(typed & {*form.no_effect}):
        raise UserError(
            f"--{flag_name(name)} has no effect on `samestep {form.verb}`, which chooses its own "
            "steps. Leave it out.",
            flags=[name],
        )


def value_of(name: str, flags: list[str]) -> str | None:
    """Return the value of a flag; the last one counts, as with every flag."""
    value = None
    for flag, following in itertools.pairwise([*flags, ""]):
        if flag == name and following:
            value = following
        if flag.startswith(f"{name}="):
            value = flag.removeprefix(f"{name}=")
    return value


def canonical_flags(arguments: list[str]) -> list[str]:
    """Replace settings under other names, as --global-batch-size or --eval-every, by the fields.

    Refuse two that set one field to different values; of a flag that is repeated the last counts.
    """
    of_units = (f.name for f in dataclasses.fields(Settings) if f.name.rpartition("_")[0] in MERGED)
    translated = {*ALSO_ACCEPTED, *OTHER_NAMES.values(), "monitor", "mode", *of_units}
    values: dict[str, Any] = {}
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
        values[name] = _number_or_text(value)
        own = canonical_names({name: value}, "the command")
        before = places.get(name)
        if before and (before.stop - before.start > 2 or flags[before.start] != typed):
            flags[before] = [None] * (before.stop - before.start)
        words = [word for key, v in own.items() for word in (f"--{flag_name(key)}", str(v))]
        places[name] = slice(len(flags), len(flags) + len(words))
        flags += words
    canonical_names(values, "the command")
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


@dataclasses.dataclass(frozen=True)
class ScriptTarget:
    """The words of a command line, by whose they are."""

    name: str  # a file, or the name of a module
    module: bool
    flags: list[str]  # those of the verb
    words: list[str]  # those of the script, which follow `--`

    def check_importable(self) -> None:
        """Check that a module is there, as `python -m` would find it here."""
        sys.path.insert(0, str(Path.cwd()))
        try:
            exists = importlib.util.find_spec(self.name) is not None
        except (ImportError, ValueError):
            exists = False
        finally:
            del sys.path[0]
        if not exists:
            raise UserError(
                f"There is no module {self.name}, seen from {Path.cwd()}. Name it as for "
                "python -m, with dots and without .py.",
                on_all_ranks=True,
            )


def script_target(verb: str, arguments: list[str], kinds: str) -> ScriptTarget:
    """Return whose the words are; the first is the target, which is one of the kinds."""
    target, *flags = arguments
    module = target == "-m"
    if module:
        if not flags or flags[0].startswith("-"):
            raise UserError("Name the module after -m, as for python -m.")
        target, *flags = flags
    elif target.startswith("-"):
        raise UserError(f"Name what to {verb} before {target}: {kinds}.")
    return ScriptTarget(target, module, *cut_at_dashes(flags))


def target_first(arguments: list[str], kind: type) -> list[str]:
    """Move the target to the front if flags of this kind, or settings, precede it."""
    switches = {f.name for form in (kind, Settings) for f in flags_of(form) if not f.takes}
    place = 0
    while place < len(arguments) and arguments[place].startswith("--") and arguments[place] != "--":
        name = arguments[place].removeprefix("--").replace("-", "_")
        alone = "=" in name or name in switches or name.startswith("no_")
        place += 1 if alone else 2
    if place >= len(arguments) or arguments[place] == "--":
        return arguments
    words = 2 if arguments[place] == "-m" else 1
    target = arguments[place : place + words]
    return [*target, *arguments[:place], *arguments[place + words :]]
