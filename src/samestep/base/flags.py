"""Flags of a command line: the fields of dataclasses, and how words become their values.

What a word means does not depend on where it stands: flags, files of settings and calls in Python
are converted alike, by `of_type`.
"""

import re
import types
import typing
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from samestep.base.errors import UserError, did_you_mean, in_words
from samestep.base.settings import flag_name
from samestep.base.words import as_typed

NumRanks = int | Literal["auto"]
"""A number of ranks to start; auto: one per GPU, else one per core."""
HERE = "here"
"""What `--resume` means without the address of a store."""
_UNDERSCORES = re.compile(r"^--[\w-]+")


@dataclass(frozen=True)
class InShell:
    """What an argument is in the shell, where its type in Python does not say it."""

    takes: str = ""
    """As `--help` shows it: FILE.py."""
    kind: Any = None
    """What a word is parsed as."""
    is_flag: bool = False
    """A flag, though Python takes it without its name, too."""
    short: tuple[str, ...] = ()
    """Other names: -o."""
    positional: bool = False
    """An argument without a name."""
    switch: bool = False
    """A bool that can only be turned on: there is no --no-NAME."""
    repeats: bool = False
    """A flag of which each one adds a value."""


@dataclass(frozen=True)
class Flag:
    """A flag of a verb, or one of its arguments."""

    name: str
    """As Python has it."""
    text: str = ""
    kind: Any = bool
    """Its type; None may be added."""
    takes: str = ""
    """As it is shown; empty for a switch."""
    default: object = None
    mark: InShell = field(default_factory=InShell)
    common: bool = True
    """Of a setting, whether the short help has it."""

    @property
    def needed(self) -> bool:
        """Whether it has no default."""
        return self.default is MISSING

    @property
    def takes_several(self) -> bool:
        """Whether it is a tuple or list of values."""
        return get_origin(without_none(self.kind)) in (tuple, list)

    @property
    def typed(self) -> str:
        """What is typed."""
        names = [", ".join([*self.mark.short, f"--{flag_name(self.name)}"])]
        return " ".join([*([] if self.mark.positional else names), self.takes]).strip()

    @property
    def shown_default(self) -> str:
        """The default as it can be typed; empty for none, an empty value and False."""
        empty = isinstance(self.default, tuple | str | None) and not self.default
        unsaid = empty or self.default is MISSING or isinstance(self.default, bool)
        return "" if unsaid else as_typed(self.default)

    def in_short(self) -> "Flag":
        """Return the flag with only the first part of its text."""
        return replace(self, text=re.split(r"[;:.] ", self.text)[0].rstrip(".") + ".")


def flags_in(form: type) -> Iterator[Flag]:
    """Yield a flag for each field of a form, a dataclass; `forms.flags_of` adds its docstrings."""
    hints = typing.get_type_hints(form, include_extras=True)
    for one in fields(form):
        kind, mark = unmarked(hints[one.name])
        yield Flag(
            one.name,
            one.metadata.get("text", ""),
            kind,
            mark.takes,
            one.default if one.default_factory is MISSING else (),
            mark,
            common=bool(one.metadata.get("common")),
        )


def unmarked(kind: Any) -> tuple[Any, InShell]:
    """Return an annotated type without its annotations, and what it is in the shell."""
    extras: list[Any] = []
    if get_origin(kind) is Annotated:
        kind, *extras = get_args(kind)
    return kind, next((extra for extra in extras if isinstance(extra, InShell)), InShell())


def without_none(kind: Any) -> Any:
    """Return a type without None, if one other is left."""
    if get_origin(kind) not in (types.UnionType, typing.Union):
        return kind
    others = [part for part in get_args(kind) if part is not types.NoneType]
    return others[0] if len(others) == 1 else kind


def of_type(value: Any, kind: Any, place: str, *, strict: bool = True) -> Any:
    """Return a value as its declared type; unless `strict`, a word as the number that it names.

    Raises:
        UserError: it is none; the message begins with `place`.
    """
    if kind in (str, str | None) and isinstance(value, list | tuple):
        value = ",".join(map(str, value))  # as the flag has several
    try:
        return msgspec.convert(value, kind, dec_hook=_path, strict=strict)
    except msgspec.ValidationError as error:
        declared = without_none(kind)
        values = get_args(declared) if get_origin(declared) is Literal else ()
        choices = ", ".join(map(repr, values))
        must = f"one of {choices}" if choices else in_words(kind)
        why = f"it must be {must}" if must else f"{error}".rstrip(".")
        raise UserError(f"{place}: {why}.") from error
    except TypeError as error:  # a type that msgspec does not take, such as Path | str
        raise UserError(f"{place}: its declared type cannot be used. {error}.") from error


def _path(kind: type, value: Any) -> Any:
    """Return a text as the path that a field declares; neither TOML nor a shell has paths."""
    return kind(value) if issubclass(kind, PurePath) and isinstance(value, str) else value


def parse(
    words: Sequence[str],
    command: str,
    *forms: type,
    below: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return the values in a command's words for each form, a dataclass of arguments and flags.

    Where two forms have a field of the same name, the first has the flag. `below` are values that
    words replace, or add to if their flag repeats. `command` begins messages.

    Raises:
        UserError: a word has no meaning here, a value is none of its type, or one is missing.
    """
    parser = _Parser(prog=command, add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    homes: dict[str, tuple[Flag, dict[str, Any]]] = {}
    parsed: list[dict[str, Any]] = [{} for _ in forms]
    for form, values in zip(forms, parsed, strict=True):
        for flag in flags_in(form):
            if flag.name not in homes:
                homes[flag.name] = flag, values
                parser.add(flag, needed=flag.needed and flag.name not in below)
    # Both --batch-size and --batch_size are right.
    words = [_UNDERSCORES.sub(lambda name: name[0].replace("_", "-"), word) for word in words]
    namespace, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        parser.refuse(unknown[0], homes)
    for name, value in vars(namespace).items():
        flag, values = homes[name]
        values[name] = parser.converted(flag, value)
        if flag.mark.repeats:
            values[name] = (*below.get(name, ()), *values[name])
    return parsed


class _Parser(ArgumentParser):
    def add(self, flag: Flag, *, needed: bool) -> None:
        names = [*flag.mark.short, f"--{flag_name(flag.name)}"]
        if flag.mark.positional:
            several = "*" if flag.takes_several else None if needed else "?"
            none = () if needed and flag.takes_several else SUPPRESS
            self.add_argument(flag.name, metavar=flag.takes or None, nargs=several, default=none)
        elif flag.kind is bool:
            action = "store_true" if flag.mark.switch else BooleanOptionalAction
            self.add_argument(*names, action=action, required=needed)
        elif flag.mark.repeats:
            self.add_argument(*names, action="append", required=needed)
        else:
            several = "*" if flag.takes_several else None
            self.add_argument(*names, nargs=several, required=needed)

    def converted(self, flag: Flag, value: Any) -> Any:
        if isinstance(value, bool):
            return value
        if value == "None" and types.NoneType in get_args(flag.kind):
            return None
        shown = flag.takes if flag.mark.positional else f"--{flag_name(flag.name)}"
        words = [value] if isinstance(value, str) else value
        try:
            return of_type(value, flag.kind, " ".join([shown, *words]), strict=False)
        except UserError as error:
            self.error(error.what)

    def refuse(self, word: str, names: Iterable[str]) -> typing.NoReturn:
        name = word.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{self.prog} does not take {word!r}")
        hint = did_you_mean(name.strip("-").replace("-", "_"), names)
        hint = re.sub(r"'(\w+)'", lambda quoted: f"--{flag_name(quoted[1])}", hint)
        self.error(f"{name} is not a flag of {self.prog}. {hint}".rstrip())

    def error(self, message: str) -> typing.NoReturn:
        end = "" if message.endswith((".", "?", "!")) else "."
        begin = message[:1] if message.startswith(self.prog) else message[:1].upper()
        more = f"`{self.prog} --help` shows all flags."
        raise UserError(f"{begin}{message[1:]}{end}", remedy=more)
