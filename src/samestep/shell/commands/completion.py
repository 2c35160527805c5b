"""`samestep completion`: a static script for bash, zsh or fish, made from the verbs' forms.

A shell that completes starts no Python.
"""

import importlib
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from samestep.base.errors import UserError
from samestep.base.settings import Settings, flag_name
from samestep.base.tracker_choice import TRACKERS
from samestep.core.recipes import RECIPES
from samestep.shell.cli import HELP_ALL, OWN, VERBS, about, example_text, show_general_help
from samestep.shell.commands.forms import Form, flags_of, form_of
from samestep.shell.commands.new import KINDS

_NAMED_FILES = ("dir", "config", "script", "plot", "out", "output", "container", "venv")
_KNOWN_VALUES = {"checkpoint": ("best", "last"), "track": (*TRACKERS,), "to": (*TRACKERS,)}
"""Suggestions for flags that take any text."""

_HELP = """\
usage: samestep completion bash|zsh|fish

Print a shell script that completes verbs, flags and their values,
recipes, files and runs. Save it where the shell looks for such scripts:

  bash  ~/.local/share/bash-completion/completions/samestep
        or at the end of ~/.bashrc:  . FILE
  zsh   a folder of $fpath, as _samestep; in ~/.zshrc, before compinit:
        fpath=(~/.zfunc $fpath)
  fish  ~/.config/fish/completions/samestep.fish

Create the folder if it does not exist, and start a new shell. The
script is static: print it again after updating samestep.

"""
_EXAMPLES = (
    "completion bash > ~/.local/share/bash-completion/completions/samestep",
    "completion zsh > ~/.zfunc/_samestep",
)


class Completed(NamedTuple):
    """One flag of a verb, with its hyphens, and its known values."""

    name: str
    takes: Literal["nothing", "value", "file"]
    values: tuple[str, ...] = ()


class Words(NamedTuple):
    """All that can be completed."""

    flags: dict[str, tuple[Completed, ...]]  # of each verb, with its group's name
    recipes: dict[str, tuple[Completed, ...]]  # the flags of each recipe's options
    training: list[str]  # the verbs that take those, too
    inner: dict[str, list[str]]  # verb → the words that may follow: its own verbs, or kinds


def main(arguments: list[str]) -> int:
    """Print the script for a shell."""
    show_general_help(arguments, _HELP + example_text(*_EXAMPLES))
    if len(arguments) > 1 or arguments[0] not in SCRIPTS:
        raise UserError(f"samestep completion {' '.join(arguments)}: choose {', '.join(SCRIPTS)}.")
    sys.stdout.write(SCRIPTS[arguments[0]](completion_words()))
    return 0


def completion_words() -> Words:
    """Return everything that can be completed; imports every verb, and so torch."""
    forms = {verb: form for verb in OWN if (form := form_of(verb)) is not None}
    recipes = {name: importlib.import_module(RECIPES[name]).recipe for name in sorted(RECIPES)}
    inner: dict[str, list[str]] = {}
    for verb, (follows, _) in OWN.items():
        group, _, name = verb.rpartition(" ")
        if group and follows != "hidden":
            inner.setdefault(group, []).append(name)
    return Words(
        {verb: tuple(_of_verb(form)) for verb, form in forms.items()},
        {name: tuple(_flags(r.options)) if r.options else () for name, r in recipes.items()},
        [verb for verb, form in forms.items() if form.settings],
        {"new": [*KINDS], **inner, "completion": [*SCRIPTS]},
    )


def _of_verb(form: Form) -> Iterator[Completed]:
    """Yield the flags of a verb, its own before the settings of the same name."""
    own = [*_flags(form.kind)]
    taken = {*(f"--{flag_name(name)}" for name in form.no_effect), *(flag.name for flag in own)}
    yield from own
    if form.settings:
        yield from (flag for flag in _flags(Settings) if flag.name not in taken)
    yield from (
        Completed(name, "nothing") for name in ["--help", HELP_ALL][: 1 + bool(form.settings)]
    )


def _flags(kind: type) -> Iterator[Completed]:
    """Yield the flags of a dataclass, and the merged settings."""
    for flag in flags_of(kind):
        if flag.mark.positional:
            continue
        name = flag_name(flag.name)
        if flag.kind is bool:
            yield Completed(f"--{name}", "nothing")
            if flag.default is True:
                yield Completed(f"--no-{name}", "nothing")
            continue
        values = _KNOWN_VALUES.get(flag.name) or _choices(flag.kind)
        is_file = Path in (flag.kind, *get_args(flag.kind))
        is_file |= any(part in _NAMED_FILES for part in flag.name.split("_"))
        yield Completed(f"--{name}", "file" if is_file else "value", values)


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the words of a `Literal`, which may be in a union."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(word for part in get_args(kind) for word in _choices(part))


_BASH = Path(__file__).with_name("completion.bash")
_ZSH = """\
#compdef samestep
autoload -U +X bashcompinit && bashcompinit
"""
_ZSH_END = """\
# As a file in $fpath this is the function that completes; else it was sourced.
if [[ "${funcstack[1]}" == _samestep ]]; then
    _bash_complete -F _samestep_complete
else
    complete -F _samestep_complete samestep
fi
"""


def bash(words: Words, end: str = "complete -F _samestep_complete samestep\n") -> str:
    """Return the script for bash."""
    places = [(verb, flag) for verb, flags in words.flags.items() for flag in flags]
    for name, flags in words.recipes.items():
        places += [(f"{verb} {name}", flag) for flag in flags for verb in words.training]
    values: dict[str, list[str]] = {}  # flags with the same values share a row
    for place, flag in places:
        if flag.takes != "nothing":
            suggestions = " ".join(flag.values) or f"@{flag.takes}"
            values.setdefault(suggestions, []).append(f"{place} {flag.name}")
    inner = [([verb], f'inner="{" ".join(after)}"') for verb, after in words.inner.items()]
    flags_of = [
        ([verb], f'target={OWN[verb][0]} flags="{_names(flags)}"')
        for verb, flags in words.flags.items()
    ]
    options = [
        ([f"{verb} {name}" for verb in words.training], f'flags+=" {_names(flags)}"')
        for name, flags in words.recipes.items()
    ]
    tables = (
        _case("_samestep_inner", "$1", inner),
        _case("_samestep_flags", "$1", flags_of),
        _case("_samestep_options", "$1 $2", options),
        _case("_samestep_value", "$1", [(p, f'values="{v}"') for v, p in values.items()]),
    )
    text = _BASH.read_text(encoding="utf-8").replace("@VERBS@", " ".join(VERBS))
    text = text.replace("@RECIPES@", " ".join(words.recipes))
    return text.replace("# @TABLES@\n", "\n".join(tables)) + f"\n{end}"


def _case(name: str, subject: str, rows: Iterable[tuple[list[str], str]]) -> str:
    """Return a function of bash that runs the action of the row with the subject."""
    patterns = (("|".join(f'"{word}"' for word in ones), do) for ones, do in rows)
    lines = (f"    {pattern}) {do} ;;" for pattern, do in patterns)
    return "\n".join([f"{name}() {{", f'    case "{subject}" in', *lines, "    esac", "}", ""])


def _names(flags: tuple[Completed, ...]) -> str:
    return " ".join(flag.name for flag in flags)


def fish(words: Words) -> str:
    """Return the script for fish."""
    seen = "__fish_seen_subcommand_from"
    lines = ["# fish completion of samestep", "complete -c samestep -f"]

    def offer(condition: str, rest: str) -> None:
        lines.append(f"complete -c samestep -n {shlex.quote(condition)} {rest}")

    def after(verb: str) -> str:
        return "; and ".join(f"{seen} {word}" for word in verb.split())

    for verb in VERBS:
        offer("__fish_use_subcommand", f"-a {verb} -d {shlex.quote(about(verb))}")
    for verb, following in words.inner.items():
        inner = " ".join(following)
        offer(f"{after(verb)}; and not {seen} {inner}", f"-a {shlex.quote(inner)}")
    recipes = shlex.quote(" ".join(words.recipes))
    targets = {"recipe": f"-F -a {recipes}", "file": "-F", "none": ""}
    for verb, flags in words.flags.items():
        for flag in flags:
            offer(after(verb), _fish_flag(flag))
        if target := targets.get(OWN[verb][0], "-F -a 'runs/*'"):
            offer(after(verb), target)
    for name, flags in words.recipes.items():
        for flag in flags:
            offer(f"{seen} {' '.join(words.training)}; and {seen} {name}", _fish_flag(flag))
    return "\n".join([*lines, ""])


def _fish_flag(flag: Completed) -> str:
    """Return a flag for fish: -x takes one of the values, -r a file."""
    takes = {"nothing": "", "file": " -r -F", "value": " -x"}[flag.takes]
    if flag.values:
        takes = f" -x -a {shlex.quote(' '.join(flag.values))}"
    return f"-l {flag.name.removeprefix('--')}{takes}"


# zsh can run a script for bash.
SCRIPTS = {"bash": bash, "zsh": lambda words: _ZSH + bash(words, _ZSH_END), "fish": fish}
