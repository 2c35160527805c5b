"""What all verbs share: types of flags, checks of their values, and the text of `--help`.

Help has flags in groups, and of the settings only the common ones unless `--help-all` is typed.
"""

import json
import re
import shutil
import sys
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from samestep.base.flags import InShell, form_fields
from samestep.base.settings import MERGED, Settings, field_docs, flag_name
from samestep.base.words import wrapped

if TYPE_CHECKING:
    from rich.console import Console

Switch = Annotated[bool, InShell(switch=True)]
Numbers = Annotated[str, InShell("N,N,…")]
MaybeNumbers = Annotated[str | None, InShell("N,N,…")]

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
    "mirror": "URL",
    "monitor": "METRIC",
    "track": "NAMES",
    "track_tags": "TAGS",
}
"""What these settings take, where `TEXT` says too little."""
_WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_COLUMN, _LEAST, _MOST = 26, 40, 100


def show_notes(texts: Iterable[str]) -> None:
    """Write notes to standard error, each wrapped."""
    for text in texts:
        sys.stderr.write("\n".join(wrapped(f"note    {text}", indent=" " * 8)) + "\n")


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON, which has neither NaN nor infinity: they become null."""
    from samestep.base.run.directory import plain  # noqa: PLC0415 - not for help

    sys.stdout.write(json.dumps(plain(value), indent=indent, default=str) + "\n")


def rich_console(*, stderr: bool = False) -> "Console":
    """Return what prints in colour to a terminal."""
    from rich.console import Console  # noqa: PLC0415 - not for help

    return Console(stderr=stderr, highlight=False)


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
    groups: dict[str, list[Flag]] = {}
    taken = {*left_out}
    for title, instance in parts.items():
        settings, heading = isinstance(instance, Settings), title
        for flag in flags_of(type(instance), vars(instance)):
            if settings:
                heading = (GROUPS if whole else _SHORT_GROUPS).get(flag.name, heading)
            if flag.name in taken:
                continue
            taken.add(flag.name)
            if whole or flag.common or not settings:
                groups.setdefault(heading, []).append(flag if whole else flag.in_short())
    groups["help"] = [Flag("help", "Show this help.", short=("-h",))]
    groups["help"] += [Flag("help_all", "Show all settings, in groups.")]
    return _text(f"{command} [flags]", about, groups)


def flags_text(
    command: str,
    about: str,
    kind: type,
    default: object = None,
    groups: Mapping[str, str] = types.MappingProxyType({}),
) -> str:
    """Return the help of a verb without settings: all its arguments and flags."""
    shown: dict[str, list[Flag]] = {"arguments": []}
    usage, heading = [command], "flags"
    for flag in flags_of(kind, {} if default is None else vars(default)):
        heading = groups.get(flag.name, heading)
        shown.setdefault("arguments" if flag.positional else heading, []).append(flag)
        if flag.positional:
            optional = not (flag.needed or flag.takes.startswith("["))
            usage.append(f"[{flag.takes}]" if optional else flag.takes)
        elif flag.needed:
            usage.append(f"--{flag_name(flag.name)} {flag.takes}")
    if len(shown) > 1:
        usage.append("[flags]")
    groups_shown = {heading: flags for heading, flags in shown.items() if flags}
    groups_shown["help"] = [Flag("help", "Show this help.", short=("-h",))]
    return _text(" ".join(usage), about, groups_shown)


@dataclass(frozen=True)
class Flag:
    """A flag of a verb, or one of its arguments."""

    name: str
    """As Python has it."""
    text: str
    kind: Any = bool
    """Its type; None may be added."""
    takes: str = ""
    """As it is shown; empty for a switch."""
    default: object = None
    short: tuple[str, ...] = ()
    positional: bool = False
    common: bool = True
    """Of a setting, whether the short help has it."""

    @property
    def needed(self) -> bool:
        """Whether it has no default."""
        return self.default is MISSING

    @property
    def typed(self) -> str:
        """What is typed."""
        names = [] if self.positional else [", ".join([*self.short, f"--{flag_name(self.name)}"])]
        return " ".join([*names, self.takes]).strip()

    @property
    def shown_default(self) -> str:
        """The default as it can be typed; empty for none, an empty value and False."""
        unsaid = self.default in (None, (), "", MISSING) or isinstance(self.default, bool)
        return "" if unsaid else shown_value(self.default)

    def in_short(self) -> "Flag":
        """Return the flag with only the first part of its text."""
        return replace(self, text=re.split(r"[;:.] ", self.text)[0].rstrip(".") + ".")


def _text(usage: str, about: str, groups: Mapping[str, Iterable[Flag]]) -> str:
    """Return a help text: a usage line, paragraphs, and groups of flags."""
    width = max(_LEAST, min(_MOST, shutil.get_terminal_size().columns))
    lines = [f"usage: samestep {usage}"]
    for part in about.split("\n\n"):
        lines += ["", *wrapped(part, "", width)]
    for heading, flags in groups.items():
        lines += [""] if heading == "help" else ["", f"{heading}:"]
        for flag in flags:
            name, room, text = f"  {flag.typed}", " " * _COLUMN, flag.text
            if flag.shown_default:
                text += f" (default: {flag.shown_default})"
            elif flag.default is True:
                text += f" (default: on; --no-{flag_name(flag.name)} turns it off)"
            below = [room + line for line in wrapped(text, "", width - _COLUMN)]
            if below and len(name) <= _COLUMN - 2:
                below[0] = name + below[0][len(name) :]
            else:
                below.insert(0, name)
            lines += below
    return "\n".join(lines) + "\n"


def flags_of(kind: type, values: Mapping[str, Any] = types.MappingProxyType({})) -> Iterator[Flag]:
    """Yield each flag of a dataclass; values win over the defaults of its fields."""
    of_settings = issubclass(kind, Settings)
    texts = {f.name: f.metadata["text"] for f in fields(kind) if "text" in f.metadata}
    texts = texts or field_docs(kind)
    for one in form_fields(kind):
        field, mark, name = one.field, one.mark, one.field.name
        merged = name.removesuffix("_epochs")
        if of_settings and merged in MERGED:
            takes, text = MERGED[merged]
            yield Flag(merged, text, str, takes)
        default = field.default if field.default_factory is MISSING else ()
        yield Flag(
            name,
            texts.get(name, ""),
            one.kind,
            mark.takes or (of_settings and _TAKES.get(name)) or word_of(one.kind),
            values.get(name, default),
            short=mark.short,
            positional=mark.positional,
            common=bool(field.metadata.get("common")),
        )


def word_of(kind: Any) -> str:
    """Return what a flag of this type takes, as `--help` shows it: INT, a|b; empty for a switch."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (types.UnionType, typing.Union):
        return "|".join(word_of(part) for part in get_args(kind) if part is not type(None))
    if get_origin(kind) in (tuple, list):
        return f"{word_of(get_args(kind)[0])} …"
    return "" if kind is bool else _WORDS.get(kind, "VALUE")


def shown_value(value: object) -> str:
    """Return a default as it can be typed; a long fraction is rounded."""
    if isinstance(value, tuple | list):
        return " ".join(map(shown_value, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else f"{value:.4g}"
    return str(getattr(value, "__name__", value))
