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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro

from samestep.errors import AlreadyTold, UserError
from samestep.ranks.nproc import NumRanks
from samestep.settings import MERGED, Settings, field_docs, flag_name

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Nproc = Annotated[NumRanks, tyro.conf.arg(metavar="INT|auto")]
RunPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]

HELP_ALL = "--help-all"
HELP = frozenset({"-h", "--help", HELP_ALL})
# A group begins with this setting and ends before the next one here.
_GROUPS = {
    "epochs": "length",
    "batch_size": "batch",
    "optimizer": "optimizer",
    "lr_scaling": "schedule",
    "engine": "machine",
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
        heading = title
        for name, text, typed, common, value in _rows(instance):
            if isinstance(instance, Settings):
                heading = (_GROUPS if whole else _SHORT_GROUPS).get(name, heading)
            if name in left_out or not (whole or common):
                continue
            if f"{heading}:" not in lines:
                lines += ["", f"{heading}:"]
            about_it = text if whole else re.split(r"[;:.] ", text)[0].rstrip(".") + "."
            flag = f"  --{flag_name(name)} {typed}".rstrip()
            lines += _entry(flag, about_it + _default(name, value), width)
    lines += ["", "  -h, --help".ljust(_COLUMN) + "Show this help."]
    lines += [f"  {HELP_ALL}".ljust(_COLUMN) + "Show all settings, in groups."]
    return "\n".join(lines) + "\n"


def _rows(instance: Any) -> Iterator[tuple[str, str, str, bool, Any]]:
    """Yield each flag: name, text, what it takes, whether it is common, its default."""
    hints = typing.get_type_hints(type(instance), include_extras=True)
    docs = field_docs(type(instance))
    settings = isinstance(instance, Settings)
    for field in fields(instance):
        name, hint = field.name, hints[field.name]
        for merged in (m for m in MERGED if settings and name == f"{m}_epochs"):
            yield merged, MERGED[merged][1], MERGED[merged][0], True, None
        if tyro.conf.Suppress not in get_args(hint)[1:]:
            kind, metavar = _kind(hint)
            typed = "" if kind is bool else metavar or _word(kind)
            common = bool(not settings or field.metadata.get("common"))
            yield name, docs.get(name, ""), typed, common, getattr(instance, name)


def _entry(flag: str, text: str, width: int) -> Iterator[str]:
    """Yield the lines of a flag: its name, and the text next to it or below it."""
    indent = " " * _COLUMN
    wrapped = textwrap.wrap(text, width - _COLUMN, break_on_hyphens=False, break_long_words=False)
    if len(flag) > _COLUMN - 2:
        yield flag
    else:
        first, *wrapped = wrapped or [""]
        yield f"{flag:<{_COLUMN}}{first}".rstrip()
    yield from (indent + line for line in wrapped)


def _kind(hint: Any) -> tuple[Any, str | None]:
    """Return the type that a flag takes, without None, and the metavar for tyro."""
    metavar = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        metavar = next((e.metavar for e in extras if getattr(e, "metavar", None)), None)
    if get_origin(hint) in (types.UnionType, typing.Union):
        given = [kind for kind in get_args(hint) if kind is not type(None)]
        if len(given) == 1:
            return given[0], metavar
    return hint, metavar


def kind_of(hint: Any) -> Any:
    """Return the type that a flag takes, without None."""
    return _kind(hint)[0]


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (tuple, list):
        return f"{_word(get_args(kind)[0])} …"
    return _WORDS.get(kind, "VALUE")


def _default(name: str, value: object) -> str:
    """Return the text for a flag's default; empty for None, empty values and False."""
    if value in (None, (), "") or value is False:
        return ""
    if value is True:
        return f" (default: on; --no-{flag_name(name)} turns it off)"
    return f" (default: {' '.join(map(str, value)) if isinstance(value, tuple | list) else value})"
