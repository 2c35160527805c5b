"""What a verb takes: arguments and flags, made of a function's signature and docstring; its help.

The function is one of the package, the one that runs the verb, or both: then the second has what
only the shell takes. `Args:` says what each is; what stands in backticks there is a flag in help.

Help has flags in groups, and of the settings only the common ones unless `--help-all` is typed.
"""

import dataclasses
import inspect
import json
import os
import re
import shutil
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from samestep.base.errors import AlreadyTold
from samestep.base.flags import Flag, InShell, flags_in, unmarked
from samestep.base.flags import parse as parse_words
from samestep.base.settings import MERGED, Settings, field_docs, flag_name
from samestep.base.words import wrapped
from samestep.shell.cli import HELP, OWN, example_text, module_of, show

if TYPE_CHECKING:
    from rich.console import Console

Source = Callable[..., Any]  # a function or a dataclass
_ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a verb takes, and what its help says."""

    verb: str
    kind: type
    """A dataclass whose fields are the arguments and flags. Its docstring is what help says first,
    with {} for the target if there is one."""
    examples: tuple[str, ...]
    settings: bool = False  # whether the settings of a training are flags, too
    no_effect: Collection[str] = ()  # the settings that the verb itself decides


@dataclass(frozen=True)
class Verb:
    """What runs a verb: parses words by its form, and calls its function."""

    form: Form
    run: Callable[[Any], int]

    def __call__(self, words: list[str]) -> int:
        """Return the exit code."""
        return self.run(parse(self.form, words))


def verb(
    name: str, *examples: str, of: Source | None = None
) -> Callable[[Callable[..., int]], Verb]:
    """Make a verb of the function that runs it: its parameters are the arguments and flags.

    With `of`, the verb also takes what this function of the package takes. The function that runs
    the verb gets it as its first argument, with a value for each parameter.
    """

    def declare(function: Callable[..., int]) -> Verb:
        if of is None:
            form = Form(verb=name, kind=kind_of(function), examples=examples)
            return Verb(form, lambda command: function(**vars(command)))
        own = [*inspect.signature(function).parameters]
        form = Form(verb=name, kind=kind_of(of, function, left_out=own[:1]), examples=examples)

        def run(command: object) -> int:
            taken = {key: value for key, value in vars(command).items() if key not in own}
            more = {key: value for key, value in vars(command).items() if key in own}
            return function(SimpleNamespace(**taken), **more)

        return Verb(form, run)

    return declare


def form_of(name: str) -> Form | None:
    """Return a built-in verb's form; None if it has verbs below, or takes only a few words."""
    for value in vars(module_of(name)).values():
        form = getattr(value, "form", value)
        if isinstance(form, Form) and form.verb == name and OWN[name][0] != "hidden":
            return form
    return None


def kind_of(*sources: Source, left_out: Collection[str] = ()) -> type:
    """Return a dataclass of what functions and dataclasses take; the last one says what it is for.

    Of two parameters with the same name the later one counts, at the place of the first.
    """
    about = inspect.cleandoc(sources[-1].__doc__ or "").partition("\n\nArgs:")[0]
    taken: dict[str, tuple[Any, Any, str]] = {}
    for source in sources:
        if isinstance(source, type):
            hints, texts = get_type_hints(source, include_extras=True), field_docs(source)
            for field in dataclasses.fields(source):
                taken[field.name] = hints[field.name], field.default, texts.get(field.name, "")
            continue
        texts = dict(_ARGUMENT.findall(inspect.cleandoc(source.__doc__ or "")))
        for name, parameter in inspect.signature(inspect.unwrap(source)).parameters.items():
            if name not in left_out and parameter.kind is not parameter.VAR_KEYWORD:
                taken[name] = *_in_shell(parameter), " ".join(texts.get(name, "").split())

    def as_flag(match: re.Match[str]) -> str:
        return f"--{flag_name(match[1])}" if match[1] in taken else match[0]

    rows = []
    for name, (kind, default, docs) in taken.items():
        text = re.sub(r"`(\w+)`", as_flag, docs)
        field = dataclasses.field(default=default, metadata={"text": text})
        rows.append((name, kind, field))
    return dataclasses.make_dataclass(
        "Command", rows, frozen=True, kw_only=True, namespace={"__doc__": about}
    )


def _in_shell(parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Return a parameter's type in the shell, with a mark, and its default."""
    kind: Any
    (kind, mark), default = unmarked(parameter.annotation), parameter.default
    parts = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if mark.kind is not None:
        kind, default = mark.kind, default or None
    elif any(get_origin(part) is os.PathLike for part in parts):
        kind = Path | None if type(None) in parts else Path
        default = Path(default) if isinstance(default, str) else default
    if parameter.kind is parameter.VAR_POSITIONAL:
        kind = tuple[kind, ...]
    positional = parameter.kind is not parameter.KEYWORD_ONLY and not mark.is_flag
    switch = mark.switch or (kind is bool and default is False)
    mark = replace(mark, positional=positional, switch=switch)
    return Annotated[kind, mark], MISSING if default is parameter.empty else default


def parse(
    form: Form,
    words: list[str],
    target: str = "",
    default: Any = None,
    groups: Mapping[str, str] = types.MappingProxyType({}),
) -> Any:
    """Return the command that the words make: an instance of `form.kind`.

    `default` has the values of flags that are not given. A group of `groups` begins with the flag
    that is its key.
    """
    title = f"{form.verb} {target}".strip()
    if HELP & {*words}:
        about = inspect.cleandoc(form.kind.__doc__ or "").replace("{}", target)
        text = flags_text(title, about, form.kind, default, groups)
        show(f"{text}\n{example_text(*form.examples)}")
        raise AlreadyTold(0)
    below = {} if default is None else vars(default)
    (values,) = parse_words(words, f"samestep {title}", form.kind, below=below)
    return form.kind(**{**below, **values})


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
    **dict.fromkeys(("monitor", "stop_monitor"), "METRIC"),
    "track": "NAMES",
    "track_tags": "TAGS",
}
"""What these settings take, where `TEXT` says too little."""
_WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_COLUMN, _LEAST, _MOST = 26, 40, 100
_HELP = Flag("help", "Show this help.", mark=InShell(short=("-h",)))


def show_notes(texts: Iterable[str]) -> None:
    """Write notes to standard error, each wrapped."""
    for text in texts:
        sys.stderr.write("\n".join(wrapped(f"note    {text}", indent=" " * 8)) + "\n")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to standard output."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


def terminal_width() -> int | None:
    """Return the columns of the terminal; None for a pipe or a file, where nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_json(value: Any, indent: int | None = None) -> None:
    """Print a value as JSON, which has neither NaN nor infinity: they become null."""
    from samestep.base.run.directory import plain  # noqa: PLC0415 - not for help

    sys.stdout.write(json.dumps(plain(value), indent=indent, default=str) + "\n")


def rich_console(*, stderr: bool = False) -> "Console":
    """Return a console that prints in colour to a terminal."""
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
    groups["help"] = [_HELP, Flag("help_all", "Show all settings, in groups.")]
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
    usage = [command]
    heading = "flags"
    for flag in flags_of(kind, {} if default is None else vars(default)):
        heading = groups.get(flag.name, heading)
        shown.setdefault("arguments" if flag.mark.positional else heading, []).append(flag)
        if flag.mark.positional:
            optional = not (flag.needed or flag.takes.startswith("["))
            usage.append(f"[{flag.takes}]" if optional else flag.takes)
        elif flag.needed:
            usage.append(f"--{flag_name(flag.name)} {flag.takes}")
    if len(shown) > 1:
        usage.append("[flags]")
    groups_shown = {heading: flags for heading, flags in shown.items() if flags}
    groups_shown["help"] = [_HELP]
    return _text(" ".join(usage), about, groups_shown)


def _text(usage: str, about: str, groups: Mapping[str, Iterable[Flag]]) -> str:
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
    texts = {} if any("text" in f.metadata for f in fields(kind)) else field_docs(kind)
    for flag in flags_in(kind):
        merged = flag.name.removesuffix("_epochs")
        if of_settings and merged in MERGED:
            takes, text = MERGED[merged]
            yield Flag(merged, text, str, takes)
        takes = flag.takes or (_TAKES.get(flag.name) if of_settings else "") or word_of(flag.kind)
        yield replace(
            flag,
            text=flag.text or texts.get(flag.name, ""),
            takes=takes,
            default=values.get(flag.name, flag.default),
        )


def word_of(kind: Any) -> str:
    """Return the placeholder of a flag's value in `--help`: INT, a|b; empty for a switch."""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (types.UnionType, typing.Union):
        return "|".join(word_of(part) for part in get_args(kind) if part is not type(None))
    if get_origin(kind) in (tuple, list):
        return f"{word_of(get_args(kind)[0])} …"
    return "" if kind is bool else _WORDS.get(kind, "VALUE")
