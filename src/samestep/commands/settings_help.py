"""The `--help` of the verbs that train: the common settings, or all of them in groups.

tyro reads the flags; its own help shows all settings in one box, with `{None}|INT` for a type.
"""

import re
import shutil
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tyro

from samestep.settings import Settings, field_docs, flag_name

# A group begins with this setting, and goes on to the next one here.
_GROUPS = {
    "epochs": "length",
    "batch_size": "batch",
    "optimizer": "optimizer",
    "lr_scaling": "schedule",
    "engine": "machine",
    "run_dir": "evaluating and saving",
    "track": "tracking",
}
_WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_COLUMN, _LEAST, _MOST = 26, 40, 100
HELP, HELP_ALL = frozenset({"-h", "--help", "--help-all"}), "--help-all"


def help_text(
    command: str,
    about: str,
    parts: Mapping[str, Any],
    left_out: Collection[str] = (),
    *,
    whole: bool = True,
) -> str:
    """Return the help of a verb.

    Args:
        command: the verb and its target.
        about: what it does.
        parts: title → the instance of a dataclass whose fields are flags, with their defaults.
        left_out: names of fields that have no effect.
        whole: whether to show all settings; else the common ones, and of each text the beginning.
    """
    width = max(_LEAST, min(_MOST, shutil.get_terminal_size().columns))
    lines = [f"usage: samestep {command} [flags]", "", *textwrap.wrap(about, width)]
    for part, instance in parts.items():
        hints = typing.get_type_hints(type(instance), include_extras=True)
        docs = field_docs(type(instance))
        title = part if whole or not isinstance(instance, Settings) else "common settings"
        for field in fields(instance):
            name = field.name
            if isinstance(instance, Settings):
                title = _GROUPS.get(name, title) if whole else title
                if not (whole or field.metadata.get("common")):
                    continue
            if name in left_out or tyro.conf.Suppress in get_args(hints[name])[1:]:
                continue
            heading = f"{title}:"
            if heading not in lines:
                lines += ["", heading]
            text = docs.get(name, "")
            text = text if whole else re.split(r"[;:.] ", text)[0].rstrip(".") + "."
            text += _default(name, getattr(instance, name))
            lines += _entry(_flag(name, hints[name]), text, width)
    lines += ["", "  -h, --help".ljust(_COLUMN) + "Show this help."]
    lines += [f"  {HELP_ALL}".ljust(_COLUMN) + "Show all settings, in groups."]
    return "\n".join(lines) + "\n"


def _entry(flag: str, text: str, width: int) -> Iterator[str]:
    """Yield the lines of a flag: its name, and the text beside it or below it."""
    indent = " " * _COLUMN
    wrapped = textwrap.wrap(text, width - _COLUMN, break_on_hyphens=False, break_long_words=False)
    if len(flag) > _COLUMN - 2:
        yield flag
    else:
        first, *wrapped = wrapped or [""]
        yield f"{flag:<{_COLUMN}}{first}".rstrip()
    yield from (indent + line for line in wrapped)


def _flag(name: str, hint: Any) -> str:
    kind, metavar = _kind(hint)
    return f"  --{flag_name(name)} {'' if kind is bool else metavar or _word(kind)}".rstrip()


def _kind(hint: Any) -> tuple[Any, str | None]:
    """Return the type that a flag takes, without None, and what tyro is told to call it."""
    metavar = None
    if get_origin(hint) is typing.Annotated:
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
    """Return what a flag is without being given, where that says anything."""
    if value in (None, (), "") or value is False:
        return ""
    if value is True:
        return f" (default: on; --no-{flag_name(name)} turns it off)"
    return f" (default: {' '.join(map(str, value)) if isinstance(value, tuple | list) else value})"
