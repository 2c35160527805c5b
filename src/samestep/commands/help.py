"""What all verbs share: types of flags, checks of their values, and the text of `--help`.

tyro parses. Its own help puts all settings into one box, with `{None}|INT` for a type, so the verbs
that take settings write theirs here: in groups, and short unless `--help-all` is typed.
"""

import math
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro

from samestep.errors import AlreadyTold, UserError
from samestep.reporting.words import wrapped
from samestep.settings import MERGED, Settings, field_docs, flag_name

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Nproc = Annotated[int | Literal["auto"], tyro.conf.arg(metavar="INT|auto")]
RunPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]

HELP_ALL = "--help-all"
HELP = frozenset({"-h", "--help", HELP_ALL})
# A group begins with this setting and ends before the next one here.
GROUPS = {
    "epochs": "length",
    "batch_size": "batch",
    "optimizer": "optimizer",
    "lr_scaling": "schedule",
    "engine": "machine",
    "strategy": "ranks",
    "run_dir": "evaluating and saving",
    "track": "tracking",
}
_SHORT_GROUPS = {"epochs": "training", "engine": "machine", "run_dir": "evaluating and saving"}
_WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_COLUMN, _LEAST, _MOST = 26, 40, 100


@contextmanager
def examples(*lines: str) -> Iterator[None]:
    """Print examples after the help that tyro prints inside; tyro itself has no place for them."""
    try:
        yield
    except SystemExit as stop:
        if not stop.code:
            sys.stdout.write("\n" + example_text(*lines))
        raise AlreadyTold(stop.code) from None


def example_text(*lines: str) -> str:
    """Return the examples of a help text; lines without `samestep` get it as a prefix."""
    whole = (line if "samestep " in line else f"samestep {line}" for line in lines)
    return "examples:\n" + "".join(f"  {line}\n" for line in whole)


def parse_flags(kind: type[T], verb: str, arguments: list[str], *lines: str) -> T:
    """Return the command that these flags make; `lines` are the examples of its `--help`."""
    with examples(*lines):
        return tyro.cli(kind, prog=f"samestep {verb}", args=arguments)


def show_general_help(arguments: list[str], text: str) -> None:
    """Print a verb's help and end if there are no arguments or the first asks for help."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(text)
        raise AlreadyTold(0 if arguments else 2)


def show_notes(texts: Iterable[str]) -> None:
    """Write notes to standard error, each wrapped."""
    for text in texts:
        sys.stderr.write("\n".join(wrapped(f"note    {text}", indent=" " * 8)) + "\n")


def check_positive(**flags: float | None) -> None:
    """Check that flags that were given are above 0."""
    for name, value in flags.items():
        if value is not None and not 0 < value < math.inf:
            least = "1 or more" if isinstance(value, int) else "greater than 0"
            raise UserError(f"--{flag_name(name)} is {value}; it must be {least}.", flags=[name])


def numbers(flag: str, text: str | None, least: int = 1, most: float = math.inf) -> tuple[int, ...]:
    """Return the distinct numbers of a list like `1,2,4` in ascending order."""
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and least <= int(word) <= most for word in words):
        span = f"from {least}" if most == math.inf else f"from {least} to {most}"
        raise UserError(
            f"--{flag} {text}: give whole numbers {span}, separated by commas: 1,2,4.",
            flags=[flag.replace("-", "_")],
        )
    return tuple(sorted({int(word) for word in words}))


def help_text(
    command: str,
    about: str,
    parts: Mapping[str, Any],
    left_out: Collection[str] = (),
    *,
    whole: bool = True,
) -> str:
    """Return the help of a verb.

    `parts`: title → an instance of a dataclass, whose fields are flags and whose values are the
    defaults. Unless `whole`, only the common settings are shown, each with its first sentence.
    """
    width = max(_LEAST, min(_MOST, shutil.get_terminal_size().columns))
    lines = [f"usage: samestep {command} [flags]", "", *textwrap.wrap(about, width)]
    for title, instance in parts.items():
        settings, heading = isinstance(instance, Settings), title
        for name, takes, text, common, default in _rows(instance):
            if settings:
                heading = (GROUPS if whole else _SHORT_GROUPS).get(name, heading)
            if name in left_out or not (whole or common or not settings):
                continue
            if f"{heading}:" not in lines:
                lines += ["", f"{heading}:"]
            about_it = text if whole else re.split(r"[;:.] ", text)[0].rstrip(".") + "."
            about_it += _default(name, default)
            flag, room = f"  --{flag_name(name)} {takes}".rstrip(), " " * _COLUMN
            below = [room + line for line in wrapped(about_it, "", width - _COLUMN)]
            if below and len(flag) <= _COLUMN - 2:
                below[0] = flag + below[0][len(flag) :]
            else:
                below.insert(0, flag)
            lines += below
    lines += ["", "  -h, --help".ljust(_COLUMN) + "Show this help."]
    lines += [f"  {HELP_ALL}".ljust(_COLUMN) + "Show all settings, in groups."]
    return "\n".join(lines) + "\n"


def _rows(instance: Any) -> Iterator[tuple[str, str, str, bool, Any]]:
    """Yield each flag: name, what it takes, text, whether it is common, its default."""
    docs = field_docs(type(instance))
    for field, kind, extras in typed_fields(type(instance)):
        name = field.name
        merged = name.removesuffix("_epochs")
        if isinstance(instance, Settings) and merged in MERGED:
            yield merged, *MERGED[merged], True, None
        if tyro.conf.Suppress not in extras:
            metavar = next((e.metavar for e in extras if getattr(e, "metavar", None)), None)
            takes = "" if kind is bool else metavar or word_of(kind)
            common = bool(field.metadata.get("common"))
            yield name, takes, docs.get(name, ""), common, getattr(instance, name)


def typed_fields(form: type) -> Iterator[tuple[Field[Any], Any, list[Any]]]:
    """Yield the fields of a dataclass: the field, its type without None, what is annotated."""
    hints = typing.get_type_hints(form, include_extras=True)
    for field in fields(form):
        kind, extras = hints[field.name], []
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
        if get_origin(kind) in (types.UnionType, typing.Union):
            given = [one for one in get_args(kind) if one is not type(None)]
            kind = given[0] if len(given) == 1 else kind
        yield field, kind, extras


def word_of(kind: Any) -> str:
    """Return what a flag of this type takes, as `--help` shows it: INT, a|b."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (tuple, list):
        return f"{word_of(get_args(kind)[0])} …"
    return _WORDS.get(kind, "VALUE")


def _default(name: str, value: object) -> str:
    """Return the text for a flag's default; empty for None, empty values and False."""
    if value in (None, (), "") or value is False:
        return ""
    if value is True:
        return f" (default: on; --no-{flag_name(name)} turns it off)"
    return f" (default: {' '.join(map(str, value)) if isinstance(value, tuple | list) else value})"
