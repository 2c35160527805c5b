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

# @TABLES@

# A verb's own flag goes before an option of the recipe with this name.
_samestep_values() {
    _samestep_value "$1 $3"
    [[ -n "$values" ]] || _samestep_value "$1 $2 $3"
}
