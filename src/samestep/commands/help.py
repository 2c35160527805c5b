"""What all verbs share: flags of one kind, what `--help` shows beside tyro's text, ranges."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from samestep.errors import AlreadyTold, UserError
from samestep.ranks.nproc import NumRanks
from samestep.recipes import RECIPES
from samestep.settings import flag_name

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Nproc = Annotated[NumRanks, tyro.conf.arg(metavar="INT|auto")]
RunPath = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@contextmanager
def examples(*lines: str) -> Iterator[None]:
    """Print examples after the help that is asked for inside; tyro has no place for them."""
    try:
        yield
    except SystemExit as stop:
        if not stop.code:
            sys.stdout.write("\n" + example_text(*lines))
        raise AlreadyTold(stop.code) from None


def example_text(*lines: str) -> str:
    """Return the end of a help text; `samestep` is put before a line that does not have it."""
    whole = (line if "samestep " in line else f"samestep {line}" for line in lines)
    return "examples:\n" + "".join(f"  {line}\n" for line in whole)


def parse_flags(kind: type[T], verb: str, arguments: list[str], *lines: str) -> T:
    """Return the command that these flags make; after `--help` examples follow tyro's text."""
    with examples(*lines):
        return tyro.cli(kind, prog=f"samestep {verb}", args=arguments)


def show_general_help(arguments: list[str], text: str) -> None:
    """Print what a verb says of itself, and end, where the first argument asks for it or lacks.

    Raises:
        AlreadyTold: 0 if it was asked for, 2 if there is no argument.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(text)
        raise AlreadyTold(0 if arguments else 2)


def recipe_files() -> list[str]:
    """Return the names of samestep's recipes without importing them, which needs torch."""
    return sorted(RECIPES)


def check_positive(**flags: float | None) -> None:
    """Check values of flags, by their names, that must be above 0 where they are given.

    Raises:
        UserError: one is not.
    """
    for name, value in flags.items():
        if value is not None and not 0 < value < math.inf:
            least = "1 or more" if isinstance(value, int) else "greater than 0"
            raise UserError(f"--{flag_name(name)} is {value}; it must be {least}.")


def numbers(flag: str, text: str | None, least: int = 1, most: float = math.inf) -> tuple[int, ...]:
    """Return the numbers of a list like `1,2,4`, ascending, each once; none if it is not given.

    Raises:
        UserError: it is no such list.
    """
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and least <= int(word) <= most for word in words):
        span = f"from {least} on" if most == math.inf else f"from {least} to {most}"
        raise UserError(
            f"--{flag} {text}: give whole numbers {span}, with commas between them: 1,2,4."
        )
    return tuple(sorted({int(word) for word in words}))
