"""`samestep completion`: a static script for bash, zsh or fish, made from the verbs' dataclasses.

A shell that completes starts no Python.
"""

import importlib
import shlex
import sys
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tyro

from samestep.cli import VERBS
from samestep.commands import slurm
from samestep.commands.help import HELP_ALL, example_text, kind_of, show_general_help
from samestep.commands.new import KINDS
from samestep.errors import UserError
from samestep.recipes import RECIPES
from samestep.settings import MERGED, Settings, flag_name
from samestep.tracking.choice import PACKAGES

Target = Literal["recipe", "run", "runs", "files", "file", "folder", "none"]
"""What the positional words are: a recipe, file or run; a run; runs; a run, then files; …"""

_NAMED_FILES = ("dir", "config", "script", "plot", "out", "container", "venv")
_KNOWN_VALUES = {"checkpoint": ("best", "last"), "track": (*PACKAGES,), "to": (*PACKAGES,)}
"""Suggestions for flags that take any text."""

# verb → the module and the dataclass of its flags, and its target. With "+" the verb takes the
# settings, too, except those in the module's tuple of that name.
COMMANDS: dict[str, tuple[str, Target]] = {
    "demo": ("demo:DemoFlags", "none"),
    "train": ("train:TrainFlags+", "recipe"),
    "explain": ("explain:ExplainFlags+", "recipe"),
    "evaluate": ("evaluate:EvaluateFlags", "run"),
    "predict": ("predict:PredictFlags", "files"),
    "track": ("track:TrackFlags", "run"),
    "profile": ("profile:ProfileFlags+", "recipe"),
    "verify": ("verify:VerifyFlags+NO_EFFECT", "recipe"),
    "runs": ("runs:RunsFlags", "folder"),
    "compare": ("compare:CompareFlags", "runs"),
    "report": ("report:ReportFlags", "runs"),
    "watch": ("watch:WatchFlags", "run"),
    "scale": ("scale:ScaleFlags+_DECIDED", "recipe"),
    "doctor": ("doctor:_Doctor", "file"),
    "data get": ("data:_Get", "none"),
    "data list": ("data:_List", "none"),
    "slurm submit": ("slurm.submit:_Submit", "recipe"),
    "slurm status": ("slurm.status:_Status", "run"),
    "slurm logs": ("slurm.logs:_Logs", "run"),
    "slurm cancel": ("slurm.cancel:_Cancel", "run"),
}
_INNER = {
    "new": (*KINDS,),
    "slurm": (*slurm.VERBS,),
    "data": ("get", "list"),
    "slurm sandbox": ("up", "status", "down"),
    "completion": ("bash", "zsh", "fish"),
}


_HELP = """\
usage: samestep completion bash|zsh|fish

Print a script with which the shell completes verbs, flags and their values,
recipes, files and runs. Keep it where the shell looks for such scripts:

  bash  ~/.local/share/bash-completion/completions/samestep
        or at the end of ~/.bashrc:  . FILE
  zsh   a folder of $fpath, as _samestep; in ~/.zshrc, before compinit:
        fpath=(~/.zfunc $fpath)
  fish  ~/.config/fish/completions/samestep.fish

Make the folder first if it does not exist. A new shell then completes. The
script is static: print it again after an update of samestep.

"""
_EXAMPLES = (
    "completion bash > ~/.local/share/bash-completion/completions/samestep",
    "completion zsh > ~/.zfunc/_samestep",
)


class Flag(NamedTuple):
    """One flag of a verb, with its hyphens, and its known values."""

    name: str
    takes: Literal["nothing", "value", "file"]
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Words:
    """Everything that can be completed."""

    flags: dict[str, tuple[Flag, ...]]
    """Verb, with its inner one, → its flags."""
    recipes: dict[str, tuple[Flag, ...]]
    """Recipe → the flags of its options."""
    with_recipes: tuple[str, ...]
    """The verbs that take a recipe's options, too."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    show_general_help(arguments, _HELP + example_text(*_EXAMPLES))
    if len(arguments) > 1 or arguments[0] not in SCRIPTS:
        raise UserError(
            f"samestep completion {' '.join(arguments)}: name one shell: {', '.join(SCRIPTS)}."
        )
    sys.stdout.write(SCRIPTS[arguments[0]](completion_words()))
    return 0


def completion_words() -> Words:
    """Return everything that can be completed; imports every verb, and so torch."""
    recipes = {name: importlib.import_module(place).recipe for name, place in RECIPES.items()}
    return Words(
        flags={verb: tuple(_of_verb(place)) for verb, (place, _) in COMMANDS.items()},
        recipes={
            name: tuple(_flags(recipe.options)) if recipe.options else ()
            for name, recipe in sorted(recipes.items())
        },
        with_recipes=tuple(verb for verb, (place, _) in COMMANDS.items() if "+" in place),
    )


def _of_verb(place: str) -> Iterator[Flag]:
    """Yield the flags of a verb, its own before the settings of the same name."""
    name, plus, refused = place.partition("+")
    module_name, _, form = name.partition(":")
    module = importlib.import_module(f"samestep.commands.{module_name}")
    own = list(_flags(getattr(module, form)))
    taken = {flag.name for flag in own}
    taken |= {f"--{flag_name(name)}" for name in getattr(module, refused or "_", ())}
    settings = _flags(Settings) if plus else ()
    yield from (*own, *(flag for flag in settings if flag.name not in taken))
    yield Flag("--help", "nothing")
    if plus:
        yield Flag(HELP_ALL, "nothing")


def _flags(form: type) -> Iterator[Flag]:
    """Yield the flags that tyro makes of a dataclass, and the merged settings."""
    hints = typing.get_type_hints(form, include_extras=True)
    for field in fields(form):
        extras = get_args(hints[field.name])[1:]
        hidden = (*get_args(tyro.conf.Positional[int]), *get_args(tyro.conf.Suppress[int]))
        if any(extra in hidden for extra in extras):
            continue
        name, kind = flag_name(field.name), kind_of(hints[field.name])
        if kind is bool:
            yield Flag(f"--{name}", "nothing")
            if field.default is True:
                yield Flag(f"--no-{name}", "nothing")
            continue
        for merged in (m for m in MERGED if form is Settings and field.name == f"{m}_epochs"):
            yield Flag(f"--{flag_name(merged)}", "value")
        values = _KNOWN_VALUES.get(field.name) or _choices(kind)
        is_file = kind is Path or any(part in _NAMED_FILES for part in field.name.split("_"))
        yield Flag(f"--{name}", "file" if is_file else "value", values)


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the words of a `Literal`, alone or in a union."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return tuple(word for part in get_args(kind) for word in _choices(part))


_BASH = """\
# Completion of samestep, as `samestep completion` printed it.
_samestep_complete() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"
    local verb="" recipe="" place="" number=0 i words="" inner="" flags="" values="" target=""
    COMPREPLY=()
    # The verb, its inner verb, and how many words without a flag stand before the cursor.
    for ((i = 1; i < COMP_CWORD; i++)); do
        local word="${COMP_WORDS[i]}"
        case "$word" in
        --) [[ "$verb" == "slurm submit" ]] && verb="train" ;;
        -*) ;;
        *)
            inner=""
            _samestep_inner "$verb"
            if [[ -z "$verb" ]]; then verb="$word"
            elif [[ -n "$inner" && $number == 0 ]]; then verb="$verb $word"
            else
                number=$((number + 1))
                [[ $number == 1 ]] && recipe="$word"
            fi ;;
        esac
    done
    if [[ -z "$verb" ]]; then
        COMPREPLY=($(compgen -W "@VERBS@ --help --version" -- "$cur"))
        return
    fi
    inner=""
    _samestep_inner "$verb"
    if [[ -n "$inner" && $number == 0 ]]; then
        COMPREPLY=($(compgen -W "$inner --help" -- "$cur"))
        return
    fi
    _samestep_flags "$verb"
    _samestep_options "$verb" "$recipe"
    if [[ "$cur" == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$cur"))
        return
    fi
    if [[ "$prev" == --?* ]]; then
        _samestep_values "$verb" "$recipe" "$prev"
        case "$values" in
        "") ;;  # a flag that takes nothing: what follows is a target
        @file) _samestep_files -f; return ;;
        @value) return ;;
        *) COMPREPLY=($(compgen -W "$values" -- "$cur")); return ;;
        esac
    fi
    case "$target $number" in
    "recipe 0")
        _samestep_files -f
        COMPREPLY+=($(compgen -W "@RECIPES@" -- "$cur")) ;;
    "run 0" | "runs "* | "files 0") _samestep_runs ;;
    "file 0" | "files "*) _samestep_files -f ;;
    "folder 0") _samestep_files -d ;;
    esac
}

# Files or directories, whatever is in their names.
_samestep_files() {
    local line
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen "$1" -- "$cur")
    compopt -o filenames 2>/dev/null
    true
}

# Without a beginning, the runs in runs/.
_samestep_runs() {
    local line
    if [[ -n "$cur" || ! -d runs ]]; then _samestep_files -d; return; fi
    for line in runs/*/; do [[ -d "$line" ]] && COMPREPLY+=("${line%/}"); done
    compopt -o filenames 2>/dev/null
    true
}

"""

_BASH_VALUES = """\
# A verb's own flag goes before an option of the recipe with this name.
_samestep_values() {
    _samestep_value "$1 $3"
    [[ -n "$values" ]] || _samestep_value "$1 $2 $3"
}
"""
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
    head = _BASH.replace("@VERBS@", " ".join(VERBS)).replace("@RECIPES@", " ".join(words.recipes))
    values: dict[str, list[str]] = {}  # flags with the same values share a row
    for verb, flags in words.flags.items():
        for flag in flags:
            values.setdefault(_values(flag), []).append(f"{verb} {flag.name}")
    for name, flags in words.recipes.items():
        for flag in flags:
            places = (f"{verb} {name} {flag.name}" for verb in words.with_recipes)
            values.setdefault(_values(flag), []).extend(places)
    values.pop("", None)
    inner = (([verb], f'inner="{" ".join(after)}"') for verb, after in _INNER.items())
    flags_of = (
        ([verb], f'target={COMMANDS[verb][1]} flags="{_names(flags)}"')
        for verb, flags in words.flags.items()
    )
    options = (
        ([f"{verb} {name}" for verb in words.with_recipes], f'flags+=" {_names(flags)}"')
        for name, flags in words.recipes.items()
    )
    parts = (
        _case("_samestep_inner", "$1", inner),
        _case("_samestep_flags", "$1", flags_of),
        _case("_samestep_options", "$1 $2", options),
        _case("_samestep_value", "$1", ((p, f'values="{v}"') for v, p in values.items())),
    )
    return head + "\n".join([*parts, _BASH_VALUES, end])


def _case(name: str, subject: str, rows: Iterable[tuple[list[str], str]]) -> str:
    """Return a function of bash that runs the action of the row with the subject."""
    patterns = (("|".join(f'"{one}"' for one in ones), do) for ones, do in rows)
    lines = (f"    {pattern}) {do} ;;" for pattern, do in patterns)
    return "\n".join([f"{name}() {{", f'    case "{subject}" in', *lines, "    esac", "}", ""])


def _values(flag: Flag) -> str:
    """Return the values of a flag, or what stands for them; nothing if it takes none."""
    return "" if flag.takes == "nothing" else " ".join(flag.values) or f"@{flag.takes}"


def _names(flags: tuple[Flag, ...]) -> str:
    return " ".join(flag.name for flag in flags)


def zsh(words: Words) -> str:
    """Return the script for zsh, which can run one for bash."""
    return _ZSH + bash(words, _ZSH_END)


def fish(words: Words) -> str:
    """Return the script for fish."""
    return "\n".join([*_fish_lines(words), ""])


def _fish_lines(words: Words) -> Iterator[str]:
    yield "# fish completion of samestep"
    yield "complete -c samestep -f"
    for verb, about in VERBS.items():
        yield _fish("__fish_use_subcommand", f"-a {verb} -d {shlex.quote(about)}")
    for verb, following in _INNER.items():
        seen = " ".join(following)
        wanted = f"{_after(verb)}; and not __fish_seen_subcommand_from {seen}"
        yield _fish(wanted, f"-a {shlex.quote(seen)}")
    for verb, flags in words.flags.items():
        for flag in flags:
            yield _fish(_after(verb), _fish_flag(flag))
        match COMMANDS[verb][1]:
            case "recipe":
                yield _fish(_after(verb), f"-F -a {shlex.quote(' '.join(words.recipes))}")
            case "run" | "runs" | "files" | "folder":
                yield _fish(_after(verb), "-F -a 'runs/*'")
            case "file":
                yield _fish(_after(verb), "-F")
    for name, flags in words.recipes.items():
        one = f"__fish_seen_subcommand_from {' '.join(words.with_recipes)}"
        for flag in flags:
            yield _fish(f"{one}; and __fish_seen_subcommand_from {name}", _fish_flag(flag))


def _after(verb: str) -> str:
    return "; and ".join(f"__fish_seen_subcommand_from {word}" for word in verb.split())


def _fish(condition: str, rest: str) -> str:
    return f"complete -c samestep -n {shlex.quote(condition)} {rest}"


def _fish_flag(flag: Flag) -> str:
    """Return a flag for fish: -x takes one of the values, -r a file."""
    name = f"-l {flag.name.removeprefix('--')}"
    if flag.takes == "nothing":
        return name
    if flag.values:
        return f"{name} -x -a {shlex.quote(' '.join(flag.values))}"
    return f"{name} {'-r -F' if flag.takes == 'file' else '-x'}"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
