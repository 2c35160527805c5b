"""What all verbs share: types of flags, checks of their values, and the text of `--help`.

tyro parses. Its own help shows `{None}|INT` for a type and `None` for a default, so the help is
written here: in groups, and of the settings only the common ones unless `--help-all` is typed.
"""

import inspect
import io
import math
import re
import shutil
import sys
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro

from samestep.base.errors import AlreadyTold, UserError
from samestep.base.settings import MERGED, Settings, field_docs, flag_name
from samestep.base.words import wrapped

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Nproc = Annotated[int | Literal["auto"], tyro.conf.arg(metavar="INT|auto")]
Numbers = Annotated[str, tyro.conf.arg(metavar="N,N,…")]
MaybeNumbers = Annotated[str | None, tyro.conf.arg(metavar="N,N,…")]
CheckpointName = Annotated[str, tyro.conf.arg(metavar="best|last|NAME")]
RunPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]

HELP_ALL = "--help-all"
HELP = frozenset({"-h", "--help", HELP_ALL})
# A group begins or continues with this setting, and ends before the next one here.
GROUPS = {
    "epochs": "length",
    "batch_size": "batch",
    "optimizer": "optimizer",
    "lr_scaling": "schedule",
    "engine": "computation",
    "device": "machine",
    "compile": "computation",
    "threads": "machine",
    "strategy": "ranks",
    "run_dir": "evaluating and saving",
    "track": "tracking",
}
_SHORT_GROUPS = {"epochs": "training", "engine": "computation", "run_dir": "evaluating and saving"}
_TAKES = {
    "init_from": "RUN|FILE",
    "warmup_steps": "NUMBER",
    "run_dir": "DIR",
    "monitor": "METRIC",
    "track": "NAMES",
    "track_tags": "TAGS",
}
"""What these settings take, where `TEXT` says too little."""
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


def parse_words(kind: type[T], words: Sequence[str], **how: Any) -> T:
    """Return what words are as a dataclass, by `tyro.cli`, whose arguments are in `how`.

    Raises:
        UserError: they cannot be parsed. tyro would print a box.
    """
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            found: T = tyro.cli(kind, args=words, **how)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_message_of(box.getvalue())) from None
    return found


def _message_of(box: str) -> str:
    """Return what a box of tyro's says: the mistake, flags like the one typed, where help is."""
    sections: list[list[str]] = [[]]
    for row in (line[2:].rstrip(" │") for line in box.splitlines() if line.startswith("│")):
        if row.strip("─"):
            sections[-1].append(row)
        else:
            sections.append([])
    if not sections[0]:  # another version of tyro may draw no box
        return " ".join(box.split()) or "The words cannot be parsed."
    first, *others = filter(None, sections)
    told = " ".join(map(str.strip, first)).rstrip(".")
    sentences = [f"{told[0].upper()}{told[1:]}."]
    for heading, *rows in others:
        flags = [words[0] for row in rows if (words := re.findall(r"--[\w-]+", row[:24]))]
        if heading.startswith("Perhaps"):
            sentences.append(f"Did you mean {' or '.join(flags)}?")
        elif heading.startswith("For full helptext"):
            command = re.sub(r"\s+", " ", " ".join([heading, *rows])).partition("samestep ")[2]
            sentences.append(f"`samestep {command}` shows all flags.")
        elif heading.startswith("Argument"):
            flag, *text = map(str.strip, rows)
            sentences.append(f"{flag}: {' '.join(text)}")
        else:
            sentences.append(f"{heading} {' '.join(map(str.strip, rows))}.")
    return " ".join(sentences)


def example_text(*lines: str) -> str:
    """Return the examples of a help text; lines without `samestep` get it as a prefix."""
    whole = (line if "samestep " in line else f"samestep {line}" for line in lines)
    return "examples:\n" + "".join(f"  {line}\n" for line in whole)


def parse_flags(
    kind: type[T],
    verb: str,
    arguments: list[str],
    *lines: str,
    default: T | None = None,
    groups: Mapping[str, str] = types.MappingProxyType({}),
) -> T:
    """Return the command that these flags make; `lines` are the examples of its `--help`.

    `default` has the values of flags that are not given. A group of `groups` begins with the flag
    that is its key.
    """
    if HELP & {*arguments}:
        _show(f"{_flags_text(verb, kind, default, groups)}\n{example_text(*lines)}")
        raise AlreadyTold(0)
    with examples(*lines):
        given = {} if default is None else {"default": default}
        return parse_words(kind, arguments, prog=f"samestep {verb}", **given)


def inner_verb(
    verb: str, about: str, verbs: Mapping[str, str], arguments: list[str], *lines: str
) -> tuple[str, list[str]]:
    """Return which of a verb's own verbs is meant, and the arguments after it."""
    width = max(map(len, verbs)) + 3
    shown = "".join(f"  {name:<{width}}{what}\n" for name, what in verbs.items())
    usage = f"usage: samestep {verb} VERB …"
    more = f"`samestep {verb} VERB --help` shows the flags of a verb."
    show_general_help(
        arguments, f"{usage}\n\n{about}\n\nverbs:\n{shown}\n{more}\n\n{example_text(*lines)}"
    )
    name, *rest = arguments
    if name not in verbs:
        raise UserError(f"samestep {verb} has no verb {name!r}. The verbs are: {', '.join(verbs)}.")
    return name, rest


def show_general_help(arguments: list[str], text: str) -> None:
    """Print a verb's help and end if there are no arguments or the first asks for help."""
    if not arguments or arguments[0] in HELP:
        _show(text)
        raise AlreadyTold(0 if arguments else 2)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()  # the reader may have left, as `head` does


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
    groups: dict[str, list[_Row]] = {}
    for title, instance in parts.items():
        settings, heading = isinstance(instance, Settings), title
        for row in _rows(type(instance), vars(instance)):
            if settings:
                heading = (GROUPS if whole else _SHORT_GROUPS).get(row.name, heading)
            if row.name not in left_out and (whole or row.common or not settings):
                groups.setdefault(heading, []).append(row if whole else row.in_short())
    groups["help"] = [_HELP_ROW, _Row("", HELP_ALL, "Show all settings, in groups.")]
    return _text(f"{command} [flags]", about, groups)


def _flags_text(
    command: str, form: type, default: object = None, groups: Mapping[str, str] | None = None
) -> str:
    """Return the help of a verb without settings: all its arguments and flags."""
    shown: dict[str, list[_Row]] = {"arguments": []}
    usage, heading = command, "flags"
    for row in _rows(form, {} if default is None else vars(default)):
        heading = (groups or {}).get(row.name, heading)
        shown.setdefault("arguments" if row.positional else heading, []).append(row)
        if row.positional and not row.flag.startswith("["):
            usage += f" {row.flag}" if row.needed else f" [{row.flag}]"
        elif row.positional or row.needed:
            usage += f" {row.flag.split(', ')[-1]}"
    shown["help"] = [_HELP_ROW]
    about = inspect.cleandoc(form.__doc__ or "")
    usage += " [flags]" * any(not row.positional for row in _rows(form, {}))
    return _text(usage, about, {k: rows for k, rows in shown.items() if rows})


@dataclass(frozen=True)
class _Row:
    """One flag of a help text."""

    name: str
    flag: str
    """With what it takes, as it is typed."""
    text: str
    common: bool = True
    needed: bool = False
    positional: bool = False
    default: str = ""

    def in_short(self) -> "_Row":
        """Return the row with only the first part of its text."""
        return replace(self, text=re.split(r"[;:.] ", self.text)[0].rstrip(".") + ".")


_HELP_ROW = _Row("", "-h, --help", "Show this help.")


def _text(usage: str, about: str, groups: Mapping[str, Iterable[_Row]]) -> str:
    """Return a help text: a usage line, paragraphs, and groups of flags."""
    width = max(_LEAST, min(_MOST, shutil.get_terminal_size().columns))
    lines = [f"usage: samestep {usage}"]
    for part in about.split("\n\n"):
        lines += ["", *wrapped(part, "", width)]
    for heading, rows in groups.items():
        lines += [""] if heading == "help" else ["", f"{heading}:"]
        for row in rows:
            flag, room = f"  {row.flag}", " " * _COLUMN
            below = [room + x for x in wrapped(f"{row.text}{row.default}", "", width - _COLUMN)]
            if below and len(flag) <= _COLUMN - 2:
                below[0] = flag + below[0][len(flag) :]
            else:
                below.insert(0, flag)
            lines += below
    return "\n".join(lines) + "\n"


def _rows(form: type, values: Mapping[str, Any]) -> Iterator[_Row]:
    """Yield each flag of a dataclass; values win over the defaults of its fields."""
    docs = field_docs(form)
    for field, kind, extras in typed_fields(form):
        name = field.name
        merged = name.removesuffix("_epochs")
        if issubclass(form, Settings) and merged in MERGED:
            takes, text = MERGED[merged]
            yield _Row(merged, f"--{flag_name(merged)} {takes}", text)
        if tyro.conf.Suppress in extras:
            continue
        value = values.get(name, field.default)
        positional = tyro.conf.Positional in extras
        aliases = [one for e in extras for one in getattr(e, "aliases", None) or ()]
        flag = ", ".join([*aliases, f"--{flag_name(name)}"]) if not positional else ""
        yield _Row(
            name,
            f"{flag} {takes_of(form, field, kind, extras)}".strip(),
            docs.get(name, ""),
            common=bool(field.metadata.get("common")),
            needed=value is MISSING and field.default_factory is MISSING,
            positional=positional,
            default="" if value is MISSING else _default(name, value),
        )


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


def takes_of(form: type, field: Field[Any], kind: Any, extras: Iterable[Any]) -> str:
    """Return what a flag takes, as `--help` shows it; empty for a switch."""
    metavars = [str(e.metavar) for e in extras if getattr(e, "metavar", None)]
    if metavars or kind is bool:
        return metavars[0] if metavars else ""
    return (issubclass(form, Settings) and _TAKES.get(field.name)) or word_of(kind)


def word_of(kind: Any) -> str:
    """Return what a flag of this type takes, as `--help` shows it: INT, a|b."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (tuple, list):
        return f"{word_of(get_args(kind)[0])} …"
    return _WORDS.get(kind, "VALUE")


def shown_value(value: object) -> str:
    """Return a default as it can be typed; a long fraction is rounded."""
    if isinstance(value, tuple | list):
        return " ".join(map(shown_value, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else f"{value:.4g}"
    return str(getattr(value, "__name__", value))


def _default(name: str, value: object) -> str:
    """Return the text for a flag's default; empty for None, empty values and False."""
    if value in (None, (), "") or value is False:
        return ""
    if value is True:
        return f" (default: on; --no-{flag_name(name)} turns it off)"
    return f" (default: {shown_value(value)})"
