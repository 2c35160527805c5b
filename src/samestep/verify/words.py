"""Numbers of things as a sentence has them."""

from collections.abc import Iterable


def listed(things: Iterable[object]) -> str:
    """Return some things, at least one, with commas and an and: `1, 2 and 3`."""
    *some, last = [str(thing) for thing in things]
    return f"{', '.join(some)} and {last}" if some else last


def counted(number: int, thing: str) -> str:
    """Return a number of things: `1 rank`, `2 ranks`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def ranks(sizes: Iterable[int]) -> str:
    """Return numbers of ranks: `1 rank`, `1 and 2 ranks`."""
    sizes = list(sizes)
    return f"{listed(sizes)} rank{'' if sizes == [1] else 's'}"
