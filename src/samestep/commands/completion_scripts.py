"""Completion scripts for bash, zsh and fish: text, made from the words that there are.

The scripts are static: a shell that completes starts no Python.
"""

import shlex
from collections.abc import Iterator

from samestep.commands.completion_words import Flag, Words

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


def bash(words: Words) -> str:
    """Return the script for bash."""
    return _bash_with(words, "complete -F _samestep_complete samestep\n")


def _bash_with(words: Words, end: str) -> str:
    head = _BASH.replace("@VERBS@", " ".join(words.verbs))
    head = head.replace("@RECIPES@", " ".join(words.recipes))
    parts = [_bash_inner(words), _bash_flags(words), _bash_options(words), _bash_values(words)]
    return head + "\n".join([*parts, end])


def zsh(words: Words) -> str:
    """Return the script for zsh, which knows how to run one for bash."""
    return _ZSH + _bash_with(words, _ZSH_END)


def _case(name: str, asked: str, rows: Iterator[tuple[str, str]]) -> str:
    """Return a function of bash that sets variables by a pattern."""
    lines = [f"    {pattern}) {action} ;;" for pattern, action in rows]
    return "\n".join([f"{name}() {{", f'    case "{asked}" in', *lines, "    esac", "}", ""])


def _bash_inner(words: Words) -> str:
    rows = ((_quoted(verb), f'inner="{" ".join(next_)}"') for verb, next_ in words.inner.items())
    return _case("_samestep_inner", "$1", rows)


def _bash_flags(words: Words) -> str:
    rows = (
        (_quoted(verb), f'target={words.targets[verb]} flags="{_names(flags)}"')
        for verb, flags in words.flags.items()
    )
    return _case("_samestep_flags", "$1", rows)


def _bash_options(words: Words) -> str:
    rows = (
        (_either(f"{verb} {name}" for verb in words.of_recipes), f'flags+=" {_names(flags)}"')
        for name, flags in words.recipes.items()
    )
    return _case("_samestep_options", "$1 $2", rows)


def _bash_values(words: Words) -> str:
    """Return the function that sets the values of a flag; flags of the same values share a row."""
    sets: dict[str, list[str]] = {}
    for verb, flags in words.flags.items():
        for flag in flags:
            sets.setdefault(_values(flag), []).append(f"{verb} {flag.name}")
    for name, flags in words.recipes.items():
        for flag in flags:
            places = (f"{verb} {name} {flag.name}" for verb in words.of_recipes)
            sets.setdefault(_values(flag), []).extend(places)
    sets.pop("", None)
    rows = ((_either(places), f'values="{values}"') for values, places in sets.items())
    # A verb's own flag goes before an option of the recipe of this name.
    text = _case("_samestep_value", "$1", rows)
    return text + (
        "\n_samestep_values() {\n"
        '    _samestep_value "$1 $3"\n'
        '    [[ -n "$values" ]] || _samestep_value "$1 $2 $3"\n'
        "}\n"
    )


def _values(flag: Flag) -> str:
    """Return the values of a flag, or what stands for them; nothing if it takes none."""
    if flag.takes == "nothing":
        return ""
    return " ".join(flag.values) or f"@{flag.takes}"


def _names(flags: tuple[Flag, ...]) -> str:
    return " ".join(flag.name for flag in flags)


def _quoted(text: str) -> str:
    return f'"{text}"'


def _either(texts: "Iterator[str] | list[str]") -> str:
    return "|".join(map(_quoted, texts))


def fish(words: Words) -> str:
    """Return the script for fish."""
    return "\n".join(["# fish completion of samestep", *_fish_lines(words), ""])


def _fish_lines(words: Words) -> Iterator[str]:
    yield "complete -c samestep -f"
    for verb, about in words.verbs.items():
        yield _fish("__fish_use_subcommand", f"-a {verb} -d {shlex.quote(about)}")
    for verb, following in words.inner.items():
        seen = " ".join(following)
        wanted = f"{_after(verb)}; and not __fish_seen_subcommand_from {seen}"
        yield _fish(wanted, f"-a {shlex.quote(seen)}")
    for verb, flags in words.flags.items():
        for flag in flags:
            yield _fish(_after(verb), _fish_flag(flag))
        match words.targets[verb]:
            case "recipe":
                yield _fish(_after(verb), f"-F -a {shlex.quote(' '.join(words.recipes))}")
            case "run" | "runs" | "files" | "folder":
                yield _fish(_after(verb), "-F -a 'runs/*'")
            case "file":
                yield _fish(_after(verb), "-F")
    for name, flags in words.recipes.items():
        one = f"__fish_seen_subcommand_from {' '.join(words.of_recipes)}"
        for flag in flags:
            yield _fish(f"{one}; and __fish_seen_subcommand_from {name}", _fish_flag(flag))


def _after(verb: str) -> str:
    return "; and ".join(f"__fish_seen_subcommand_from {word}" for word in verb.split())


def _fish(condition: str, rest: str) -> str:
    return f"complete -c samestep -n {shlex.quote(condition)} {rest}"


def _fish_flag(flag: Flag) -> str:
    """Return a flag for fish: -x takes one of some values, -r a file."""
    name = f"-l {flag.name.removeprefix('--')}"
    if flag.takes == "nothing":
        return name
    if flag.values:
        return f"{name} -x -a {shlex.quote(' '.join(flag.values))}"
    return f"{name} {'-r -F' if flag.takes == 'file' else '-x'}"
