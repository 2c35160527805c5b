"""What a verb takes: arguments and flags, made of a function's signature and docstring; parsing.

The function is one of the package, the one that runs the verb, or both: then the second has what
only the shell takes. `Args:` says what each is; what stands in backticks there is a flag in help.
"""

import dataclasses
import inspect
import os
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from samestep.base import flags
from samestep.base.errors import AlreadyTold
from samestep.base.flags import InShell
from samestep.base.settings import field_docs, flag_name
from samestep.shell.cli import HELP, OWN, example_text, module_of, show
from samestep.shell.commands.help import flags_text

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
    settings: bool = False
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
        rows.append((name, kind, field))
    return dataclasses.make_dataclass(
        "Command", rows, frozen=True, kw_only=True, namespace={"__doc__": about}
    )


def _in_shell(parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Return what a parameter is in the shell: its type, with a mark, and its default."""
    kind: Any = parameter.annotation
    default, mark = parameter.default, InShell()
    if get_origin(kind) is Annotated:
        kind, *extras = get_args(kind)
        mark = next((extra for extra in extras if isinstance(extra, InShell)), mark)
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
    (given,) = flags.parse(words, f"samestep {title}", form.kind, below=below)
    return form.kind(**{**below, **given})
