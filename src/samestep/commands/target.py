"""What the verbs that train share: a target, then the settings' flags beside the verb's own."""

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from samestep.errors import UserError
from samestep.execution.request import Request, draft, finish
from samestep.ranks.launch import detect_launch
from samestep.recipe import recipe_names
from samestep.screen.words import wrapped
from samestep.settings import Settings


def check_named(target: str, verb: str) -> None:
    """Refuse a flag where the target is to stand.

    Raises:
        UserError: it is one.
    """
    if target.startswith("-"):
        raise UserError(
            f"Name what to {verb} before {target}: a recipe ({', '.join(recipe_names())}), a "
            "recipe file, or the directory of a run."
        )


def general_help(verb: str, about: str, examples: str) -> str:
    """Return what a verb says of itself without a target."""
    text = (
        f"{about} TARGET is a recipe ({', '.join(recipe_names())}), a recipe file (my_recipe.py), "
        f"or the directory of a run. `samestep {verb} TARGET --help` shows all flags."
    )
    return f"usage: samestep {verb} TARGET [flags]\n\n" + "\n".join([*wrapped(text), "", examples])


def parse(
    target: str,
    flags: list[str],
    *,
    verb: str,
    about: str,
    kind: type,
    settings: Callable[[Settings], Settings] = lambda settings: settings,
) -> tuple[Any, Request]:
    """Return the command and the request that these flags make of a target.

    Args:
        target: a recipe, a recipe file or a run.
        flags: what follows it.
        verb: the verb's name.
        about: what `--help` says it does; {} becomes the recipe's name.
        kind: a dataclass of what the verb itself takes.
        settings: from the settings below the flags to those that the verb takes as flags.

    Raises:
        UserError: anything in them is wrong.
        SystemExit: 2 for a flag that is unknown or ill-typed, 0 after --help.
    """
    start = draft(target, config_of(flags))
    taken = settings(start.settings())
    kinds: list[tuple[str, Any]] = [("command", kind), ("settings", type(taken))]
    defaults: dict[str, Any] = {"command": kind(), "settings": taken}
    if start.recipe.options:
        kinds.append(("recipe", start.recipe.options))
        defaults["recipe"] = start.options()
    form = dataclasses.make_dataclass(verb.title(), kinds, frozen=True)
    form.__doc__ = about.format(start.recipe.name)
    parsed = tyro.cli(
        form,
        prog=f"samestep {verb} {target}",
        args=flags,
        default=form(**defaults),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    request = finish(
        start,
        parsed.settings,
        getattr(parsed, "recipe", None),
        given=names_given(flags),
        resume=getattr(parsed.command, "resume", False),
    )
    if request.resume and request.settings.run_dir is None:
        raise UserError(
            "--resume needs a run: samestep train runs/ID --resume, or --run-dir DIR to begin "
            "there and go on there whenever the command is repeated."
        )
    return parsed.command, request


def config_of(flags: list[str]) -> Path | None:
    """Return the TOML file among the flags: it decides what the other flags' defaults are."""
    config = None  # the last one counts, as for every flag
    for flag, following in itertools.pairwise([*flags, ""]):
        if flag == "--config" and following:
            config = Path(following)
        if flag.startswith("--config="):
            config = Path(flag.removeprefix("--config="))
    return config


def names_given(flags: list[str]) -> set[str]:
    """Return the names of the settings and options that are among the flags."""
    names = {f.removeprefix("--").split("=")[0].replace("-", "_") for f in flags if f[:2] == "--"}
    return names | {name.removeprefix("no_") for name in names}


def refuse_inside_launcher(what: str, instead: str) -> None:
    """Refuse to start ranks where a launcher has started this process among others.

    Args:
        what: what was to start them, as the message's subject.
        instead: what to do.

    Raises:
        UserError: it has.
    """
    launch = detect_launch(os.environ)
    if launch.world_size > 1:
        raise UserError(
            f"{what} starts ranks itself, but {launch.launcher} has already started "
            f"{launch.world_size}. {instead}",
            on_all_ranks=True,
        )
