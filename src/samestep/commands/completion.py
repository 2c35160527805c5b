"""`samestep completion`: a script that lets the shell complete samestep's command line."""

import sys

from samestep.commands.help import example_text, show_general_help
from samestep.errors import UserError

_SHELLS = ("bash", "zsh", "fish")
_HELP = """\
usage: samestep completion bash|zsh|fish

Print a script with which the shell completes verbs, flags and their values,
recipes, files and runs. Keep it where the shell looks for such scripts:

  bash  ~/.local/share/bash-completion/completions/samestep
        or at the end of ~/.bashrc:  . FILE
  zsh   a folder of $fpath, as _samestep; in ~/.zshrc, before compinit:
        fpath=(~/.zfunc $fpath)
  fish  ~/.config/fish/completions/samestep.fish

Make the folder first if it is not there. A new shell then completes. The script
stays as it is: print it again after an update of samestep.

"""
_EXAMPLES = (
    "completion bash > ~/.local/share/bash-completion/completions/samestep",
    "completion zsh > ~/.zfunc/_samestep",
)


def main(arguments: list[str]) -> int:
    """Run the verb."""
    show_general_help(arguments, _HELP + example_text(*_EXAMPLES))
    if len(arguments) > 1 or arguments[0] not in _SHELLS:
        raise UserError(
            f"samestep completion {' '.join(arguments)}: name one shell: {', '.join(_SHELLS)}."
        )
    from samestep.commands import completion_scripts  # noqa: PLC0415 - they import torch
    from samestep.commands.completion_words import completion_words  # noqa: PLC0415

    sys.stdout.write(getattr(completion_scripts, arguments[0])(completion_words()))
    return 0
