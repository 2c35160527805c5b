"""What the verbs that run any script share: which words name it, and which are its own."""

import importlib.util
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from samestep.base.errors import UserError


@dataclass(frozen=True)
class ScriptTarget:
    """The words of a command line, by whose they are."""

    name: str
    """A file, or the name of a module."""
    module: bool
    flags: list[str]
    """Those of the verb."""
    words: list[str]
    """Those of the script, which follow `--`."""

    def check_importable(self) -> None:
        """Check that a module is there, as `python -m` would find it here."""
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = importlib.util.find_spec(self.name) is not None
        except (ImportError, ValueError):
            found = False
        finally:
            del sys.path[0]
        if not found:
            raise UserError(
                f"There is no module {self.name}, seen from {Path.cwd()}. Name it as for "
                "python -m, with dots and without .py.",
                on_all_ranks=True,
            )


def script_target(verb: str, arguments: list[str], kinds: str) -> ScriptTarget:
    """Return whose the words are; the first is the target, which is one of the kinds."""
    target, *flags = arguments
    module = target == "-m"
    if module:
        if not flags or flags[0].startswith("-"):
            raise UserError("Name the module after -m, as for python -m.")
        target, *flags = flags
    elif target.startswith("-"):
        raise UserError(f"Name what to {verb} before {target}: {kinds}.")
    cut = flags.index("--") if "--" in flags else len(flags)
    return ScriptTarget(target, module, flags[:cut], flags[cut + 1 :])


def target_first(arguments: list[str], switches: Collection[str]) -> list[str]:
    """Move the target to the front if flags precede it; switches are flags without a value."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("--") and arguments[place] != "--":
        name = arguments[place].removeprefix("--").replace("-", "_")
        alone = "=" in name or name in switches or name.startswith("no_")
        place += 1 if alone else 2
    if place >= len(arguments) or arguments[place] == "--":
        return arguments
    words = 2 if arguments[place] == "-m" else 1
    target = arguments[place : place + words]
    return [*target, *arguments[:place], *arguments[place + words :]]
