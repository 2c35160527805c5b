"""What a verb takes: arguments and flags, made of a function's signature and docstring; parsing.

The function is one of the package, the one that runs the verb, or both: then the second has what
only the shell takes. `Args:` says what each is; what stands in backticks there is a flag in help.
"""

import dataclasses
import inspect
import io
import os
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from samestep.base.errors import AlreadyTold, UserError
from samestep.base.settings import Settings, field_docs, flag_name
from samestep.shell.api.arguments import InShell
from samestep.shell.cli import HELP, OWN, example_text, module_of, show
from samestep.shell.commands.help import flags_text

T = TypeVar("T")
Source = Callable[..., Any]
"""A function or a dataclass."""
_ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a verb takes, and what its help says."""

    verb: str
    kind: type
    """A dataclass whose fields are the arguments and flags. Its docstring is what help says first,
    with {} for the target if there is one."""
    examples: tuple[str, ...]
    settings: type[Settings] | None = None
    """Of a verb that trains a target: these are flags, too."""
    no_effect: Collection[str] = ()
    """The settings that the verb itself decides."""


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
            given = {key: value for key, value in vars(command).items() if key not in own}
            more = {key: value for key, value in vars(command).items() if key in own}
            return function(SimpleNamespace(**given), **more)

        return Verb(form, run)

    return declare


def form_of(name: str) -> Form | None:
    """Return what a verb of samestep's own takes; None if that is a verb, or one of a few words."""
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
        rows.append((name, Annotated[kind, tyro.conf.arg(help=text)], field))
    return dataclasses.make_dataclass(
        "Command", rows, frozen=True, kw_only=True, namespace={"__doc__": about}
    )


def _in_shell(parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Return what a parameter is for tyro: its type, with marks, and its default."""
    kind, default = parameter.annotation, parameter.default
    shell, marks = InShell(), list[Any]()
    if get_origin(kind) is Annotated:
        kind, *extras = get_args(kind)
        shell = next((extra for extra in extras if isinstance(extra, InShell)), shell)
        marks += [extra for extra in extras if extra is not shell]
    parts = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if shell.kind is not None:
        kind, default = shell.kind, default or None
    elif any(get_origin(part) is os.PathLike for part in parts):
        kind = Path | None if type(None) in parts else Path
        default = Path(default) if isinstance(default, str) else default
    if parameter.kind is parameter.VAR_POSITIONAL:
        kind = types.GenericAlias(tuple, (kind, ...))
    marks.append(tyro.conf.arg(metavar=shell.takes or None, aliases=shell.short or None))
    if parameter.kind is not parameter.KEYWORD_ONLY and not shell.is_flag:
        marks.append(tyro.conf.Positional)
    if kind is bool and default is False:
        marks.append(tyro.conf.FlagCreatePairsOff)
    return Annotated[(kind, *marks)], MISSING if default is parameter.empty else default


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
    given = {} if default is None else {"default": default}
    return parse_words(form.kind, words, prog=f"samestep {title}", **given)


def parse_words(kind: type[T], words: Sequence[str], **options: Any) -> T:
    """Return what words are as a dataclass; `options` are further arguments of `tyro.cli`.

    Raises:
        UserError: they cannot be parsed. tyro would print a box.
    """
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            command: T = tyro.cli(kind, args=words, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_message_of(box.getvalue())) from None
    return command


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
    mistake = " ".join(map(str.strip, first)).rstrip(".")
    sentences = [f"{mistake[0].upper()}{mistake[1:]}."]
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
