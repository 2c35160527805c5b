"""What the verbs that train share: a target, then the settings' flags beside the verb's own."""

import dataclasses
import itertools
import os
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import tyro
from tyro.conf import Suppress

from samestep.commands.help import example_text, examples, recipe_files
from samestep.commands.settings_help import HELP, HELP_ALL, help_text
from samestep.errors import AlreadyTold, UserError, known_elsewhere
from samestep.ranks.process import TASK
from samestep.recipe import Recipe
from samestep.recipe_checks import telling_options
from samestep.session.request import Request, draft, finish, own_recipe
from samestep.settings import OTHER_NAMES, Settings, flag_name, own_names


def parse_target(
    verb: str,
    about: str,
    kind: type,
    arguments: list[str],
    *lines: str,
    settings: type[Settings] = Settings,
    no_effect: Collection[str] = (),
) -> tuple[Any, Request]:
    """Return the command and the request that a target and the flags after it make.

    Args:
        verb: the verb's name.
        about: what `--help` says it does, with {} for the target.
        kind: a dataclass of what the verb itself takes.
        arguments: the target (a recipe, a recipe file or a run), and its flags.
        lines: examples.
        settings: the settings that the verb takes as flags.
        no_effect: names of those that it decides by itself.

    Raises:
        UserError: anything in the arguments is wrong.
        SystemExit: 2 for a flag that is unknown or ill-typed, 0 after --help.
    """
    if not arguments or arguments[0] in HELP:
        _show_general(verb, about, kind, arguments, lines, settings(), no_effect)
    target, *flags = own_flags(arguments)
    if target.startswith("-"):
        raise UserError(
            f"Name what to {verb} before {target}: a recipe ({', '.join(recipe_files())}), a "
            "recipe file, or the directory of a run."
        )
    if target in recipe_files():
        lines = tuple(line.replace("spiral", target) for line in lines)
    # What a recipe prints when it is read would stand before a verb's JSON object. Ranks that a
    # verb started for a task of its own print nowhere, or are watched while they do.
    asks_help, is_rank = HELP & set(flags), TASK in os.environ
    quiet = hasattr(kind, "json") and not asks_help and not is_rank
    with examples(*lines), redirect_stdout(sys.stderr if quiet else sys.stdout):
        start = draft(target, config_of(flags), _recipe_of_run(kind, target, flags))
        taken = settings(**vars(start.settings()))
        parts = {"command": kind(), "settings": taken, "recipe": _beside(kind, start.options())}
        given = names_given(flags)
        about = about.format(start.recipe.name)
        if asks_help:
            _show_help(verb, target, about, parts, no_effect, whole=HELP_ALL in flags)
        parsed = _parse(f"{verb} {target}", about, flags, parts)
        request = finish(
            start,
            parsed.settings,
            _as_was(start.options(), getattr(parsed, "recipe", None)),
            given=given,
            resume=getattr(parsed.command, "resume", False),
            allow_change=getattr(parsed.command, "allow_change", None),
        )
    _check_effect(verb, given & set(no_effect))
    return parsed.command, request


def _check_effect(verb: str, given: set[str]) -> None:
    for name in sorted(given):
        raise UserError(
            f"--{flag_name(name)} has no effect on `samestep {verb}`, which chooses its own steps. "
            "Leave it out."
        )


def _recipe_of_run(kind: type, target: str, flags: list[str]) -> Recipe | None:
    """Return the copy of its recipe that a run keeps, where the flags ask for it.

    Raises:
        UserError: no run is to go on.
    """
    if "--recipe-of-run" not in flags or not hasattr(kind, "recipe_of_run"):
        return None
    if "--resume" not in flags:
        raise UserError("--recipe-of-run has no effect without --resume.")
    return own_recipe(target, value_of("--run-dir", flags))


def _beside(kind: type, options: Any) -> Any:
    """Return options of which none has a flag that the verb has: a TOML file sets those.

    Where their class checks itself, what it refuses is told with its line.
    """
    if options is None:
        return None
    names = {own.name for own in dataclasses.fields(kind)}
    both = [f for f in dataclasses.fields(options) if f.name in names]
    shown = type(options)
    checks = getattr(shown, "__post_init__", None)
    if not both and checks is None:
        return options
    hints = get_type_hints(shown, include_extras=True)
    hidden = [
        (f.name, Annotated[hints[f.name], tyro.conf.arg(name=f"option-{f.name}"), Suppress], f)
        for f in both
    ]
    frozen = shown.__dataclass_params__.frozen
    told = {} if checks is None else {"__post_init__": telling_options(shown)(checks)}
    form = dataclasses.make_dataclass(
        shown.__name__, hidden, bases=(shown,), frozen=frozen, namespace=told
    )
    return form(**{f.name: getattr(options, f.name) for f in dataclasses.fields(options)})


def _as_was(before: Any, parsed: Any) -> Any:
    """Return the options as their own class has them."""
    if type(before) is type(parsed):
        return parsed
    return type(before)(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(before)})


def _show_help(
    verb: str,
    target: str,
    about: str,
    parts: dict[str, Any],
    no_effect: Collection[str],
    *,
    whole: bool,
) -> NoReturn:
    titles = {"command": verb, "recipe": f"options of {target}", "settings": "settings"}
    groups = {title: parts[key] for key, title in titles.items() if parts[key]}
    sys.stdout.write(help_text(f"{verb} {target}", about, groups, no_effect, whole=whole))
    sys.stdout.flush()  # whoever read it may have left, as `head` does
    raise SystemExit(0)


def _parse(command: str, about: str, flags: list[str], parts: dict[str, Any]) -> Any:
    """Return the parts, of which one may be None, with these flags."""
    parts = {key: part for key, part in parts.items() if part is not None}
    types = [(key, type(part)) for key, part in parts.items()]
    form = dataclasses.make_dataclass("Form", types, frozen=True)
    known = {field.name for part in parts.values() for field in dataclasses.fields(part)}
    for name in sorted(names_given(flags) - known):
        if meant := known_elsewhere(name, known):
            raise UserError(
                f"--{flag_name(name)} is no flag of samestep {command}: it is called "
                f"--{flag_name(meant)} here."
            )
    return tyro.cli(
        form,
        prog=f"samestep {command}",
        description=about,
        args=flags,
        default=form(**parts),
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _show_general(
    verb: str,
    about: str,
    kind: type,
    arguments: list[str],
    lines: tuple[str, ...],
    settings: Settings,
    no_effect: Collection[str],
) -> NoReturn:
    """Print what a verb says of itself without a target."""
    text = (
        f"{about.format('TARGET')} TARGET is a recipe ({', '.join(recipe_files())}), a recipe file "
        "(my_recipe.py), or the directory of a run. "
        f"`samestep {verb} TARGET --help` shows its own defaults and options."
    )
    parts = {verb: kind(), "settings": settings}
    whole = HELP_ALL in arguments
    shown = help_text(f"{verb} TARGET", text, parts, no_effect, whole=whole)
    sys.stdout.write(f"{shown}\n{example_text(*lines)}")
    raise AlreadyTold(0 if arguments else 2)


def config_of(flags: list[str]) -> Path | None:
    """Return the TOML file among the flags: it decides what the other flags' defaults are."""
    config = value_of("--config", flags)
    return Path(config) if config else None


def value_of(name: str, flags: list[str]) -> str | None:
    """Return what a flag is given; the last one counts, as for every flag."""
    found = None
    for flag, following in itertools.pairwise([*flags, ""]):
        if flag == name and following:
            found = following
        if flag.startswith(f"{name}="):
            found = flag.removeprefix(f"{name}=")
    return found


def own_flags(flags: list[str]) -> list[str]:
    """Return the flags by their own names: `--global-batch-size` is another one of `--batch-size`.

    Raises:
        UserError: two names of one setting are given, with different values.
    """
    found: dict[str, Any] = {}
    named = []
    for flag, following in itertools.pairwise([*flags, ""]):
        typed, equals, value = flag.partition("=")
        name = typed.removeprefix("--").replace("-", "_")
        if typed.startswith("--") and name in (*OTHER_NAMES, *OTHER_NAMES.values()):
            found[name] = value if equals else following
            own = "--" + flag_name(OTHER_NAMES.get(name, name))
            named.append(f"{own}{equals}{value}")
        else:
            named.append(flag)
    own_names(found, "the command")
    return named


def names_given(flags: list[str]) -> set[str]:
    """Return the names of the settings and options that are among the flags."""
    names = {f.removeprefix("--").split("=")[0].replace("-", "_") for f in flags if f[:2] == "--"}
    return names | {name.removeprefix("no_") for name in names}
