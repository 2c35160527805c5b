"""`samestep completion`: a static script for bash, zsh or fish, made from the verbs' dataclasses.

A shell that completes starts no Python.
"""

import importlib
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tyro

from samestep.base.errors import UserError
from samestep.base.settings import MERGED, Settings, flag_name
from samestep.base.tracker_choice import TRACKERS
from samestep.core.recipes import RECIPES
from samestep.shell.cli import VERBS, about
from samestep.shell.commands import slurm
from samestep.shell.commands.help import HELP_ALL, example_text, show_general_help, typed_fields
from samestep.shell.commands.new import KINDS

Target = Literal["recipe", "run", "runs", "files", "file", "folder", "none"]
"""What the positional words are: a recipe, file or run; a run; runs; a run, then files; …"""

_NAMED_FILES = ("dir", "config", "script", "plot", "out", "output", "container", "venv")
_KNOWN_VALUES = {"checkpoint": ("best", "last"), "track": (*TRACKERS,), "to": (*TRACKERS,)}
"""Suggestions for flags that take any text."""

# verb → the module and the dataclass of its flags, and its target. With "+" the verb takes the
# settings, too, except those in the module's tuple of that name.
COMMANDS: dict[str, tuple[str, Target]] = {
    "demo": ("demo:DemoFlags", "none"),
    "train": ("train:TrainFlags+", "recipe"),
    "sweep": ("sweep:SweepFlags+", "recipe"),
    "explain": ("explain:ExplainFlags+", "recipe"),
    "evaluate": ("evaluate:EvaluateFlags", "run"),
    "predict": ("predict:PredictFlags", "files"),
    "checkpoint list": ("checkpoint:_ListCheckpoints", "run"),
    "checkpoint verify": ("checkpoint:_VerifyCheckpoints", "run"),
    "checkpoint export": ("checkpoint:_ExportWeights", "run"),
    "track": ("track:TrackFlags", "run"),
    "profile": ("profile:ProfileFlags+", "recipe"),
    "verify": ("verify:VerifyFlags+NO_EFFECT", "recipe"),
    "check": ("check:CheckFlags", "file"),
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
    "slurm sandbox up": ("slurm.sandbox:SandboxUp", "none"),
    "slurm sandbox status": ("slurm.sandbox:SandboxStatus", "none"),
    "slurm sandbox down": ("slurm.sandbox:SandboxDown", "none"),
}
_INNER = {
    "new": (*KINDS,),
    "slurm": (*slurm.VERBS,),
    "data": ("get", "list"),
    "checkpoint": ("list", "verify", "export"),
    "slurm sandbox": ("up", "status", "down"),
    "completion": ("bash", "zsh", "fish"),
}
_TRAINING = [verb for verb, (place, _) in COMMANDS.items() if "+" in place]
"""The verbs that take a recipe's options, too."""

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


class Words(NamedTuple):
    """The flags of each verb, with its inner one, and of each recipe's options."""

    flags: dict[str, tuple[Flag, ...]]
    recipes: dict[str, tuple[Flag, ...]]


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
    recipes = {name: importlib.import_module(RECIPES[name]).recipe for name in sorted(RECIPES)}
    return Words(
        {verb: tuple(_of_verb(place)) for verb, (place, _) in COMMANDS.items()},
        {name: tuple(_flags(one.options)) if one.options else () for name, one in recipes.items()},
    )


def _of_verb(place: str) -> Iterator[Flag]:
    """Yield the flags of a verb, its own before the settings of the same name."""
    name, plus, refused = place.partition("+")
    module_name, _, form = name.partition(":")
    module = importlib.import_module(f"samestep.shell.commands.{module_name}")
    own = [*_flags(getattr(module, form))]
    taken = {f"--{flag_name(name)}" for name in getattr(module, refused or "_", ())}
    taken |= {flag.name for flag in own}
    yield from (*own, *(one for one in _flags(Settings) if plus and one.name not in taken))
    yield from (Flag(name, "nothing") for name in (("--help", HELP_ALL) if plus else ("--help",)))


def _flags(form: type) -> Iterator[Flag]:
    """Yield the flags that tyro makes of a dataclass, and the merged settings."""
    for field, kind, extras in typed_fields(form):
        if tyro.conf.Suppress in extras or tyro.conf.Positional in extras:
            continue
        name = f"--{flag_name(field.name)}"
        if kind is bool:
            no = (f"--no-{name[2:]}",) if field.default is True else ()
            yield from (Flag(one, "nothing") for one in (name, *no))
            continue
        merged = field.name.removesuffix("_epochs")
        if form is Settings and merged in MERGED:
            yield Flag(f"--{flag_name(merged)}", "value")
        values = _KNOWN_VALUES.get(field.name) or _choices(kind)
        is_file = kind is Path or any(part in _NAMED_FILES for part in field.name.split("_"))
        yield Flag(name, "file" if is_file else "value", values)


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the words of a `Literal`, which may be in a union."""
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
    places = [(verb, flag) for verb, flags in words.flags.items() for flag in flags]
    for name, flags in words.recipes.items():
        places += [(f"{verb} {name}", flag) for flag in flags for verb in _TRAINING]
    values: dict[str, list[str]] = {}  # flags with the same values share a row
    for place, flag in places:
        if flag.takes != "nothing":
            known = " ".join(flag.values) or f"@{flag.takes}"
            values.setdefault(known, []).append(f"{place} {flag.name}")
    inner = [([verb], f'inner="{" ".join(after)}"') for verb, after in _INNER.items()]
    flags_of = [
        ([verb], f'target={COMMANDS[verb][1]} flags="{_names(flags)}"')
        for verb, flags in words.flags.items()
    ]
    options = [
        ([f"{verb} {name}" for verb in _TRAINING], f'flags+=" {_names(flags)}"')
        for name, flags in words.recipes.items()
    ]
    parts = (
        _case("_samestep_inner", "$1", inner),
        _case("_samestep_flags", "$1", flags_of),
        _case("_samestep_options", "$1 $2", options),
        _case("_samestep_value", "$1", [(p, f'values="{v}"') for v, p in values.items()]),
    )
    return head + "\n".join([*parts, _BASH_VALUES, end])


def _case(name: str, subject: str, rows: Iterable[tuple[list[str], str]]) -> str:
    """Return a function of bash that runs the action of the row with the subject."""
    patterns = (("|".join(f'"{one}"' for one in ones), do) for ones, do in rows)
    lines = (f"    {pattern}) {do} ;;" for pattern, do in patterns)
    return "\n".join([f"{name}() {{", f'    case "{subject}" in', *lines, "    esac", "}", ""])


def _names(flags: tuple[Flag, ...]) -> str:
    return " ".join(flag.name for flag in flags)


def zsh(words: Words) -> str:
    """Return the script for zsh, which can run one for bash."""
    return _ZSH + bash(words, _ZSH_END)


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
    for verb, following in _INNER.items():
        inner = " ".join(following)
        offer(f"{after(verb)}; and not {seen} {inner}", f"-a {shlex.quote(inner)}")
    recipes = shlex.quote(" ".join(words.recipes))
    targets = {"recipe": f"-F -a {recipes}", "file": "-F", "none": ""}
    for verb, flags in words.flags.items():
        for flag in flags:
            offer(after(verb), _fish_flag(flag))
        if target := targets.get(COMMANDS[verb][1], "-F -a 'runs/*'"):
            offer(after(verb), target)
    for name, flags in words.recipes.items():
        for flag in flags:
            offer(f"{seen} {' '.join(_TRAINING)}; and {seen} {name}", _fish_flag(flag))
    return "\n".join([*lines, ""])


def _fish_flag(flag: Flag) -> str:
    """Return a flag for fish: -x takes one of the values, -r a file."""
    takes = {"nothing": "", "file": " -r -F", "value": " -x"}[flag.takes]
    if flag.values:
        takes = f" -x -a {shlex.quote(' '.join(flag.values))}"
    return f"-l {flag.name.removeprefix('--')}{takes}"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
