"""One fixed binary tree over parts 0, 1, 2 …: sums along it have the same bits, whoever adds what.

Parts are the leaves. Of two neighbours on a level, 2k and 2k + 1, the sum is node k of the level
above; a node without a right neighbour is that node by itself. So the tree depends on the number
of parts alone, and parts that are absent can only be the last ones.
"""

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Root(NamedTuple, Generic[T]):
    """The sum of a whole subtree."""

    level: int
    """Leaves have level 0."""
    number: int
    """Place on its level."""
    value: T


class TreeSum(Generic[T]):
    """Add values part by part, as a binary counter counts: few partial sums live at a time.

    Args:
        add: returns the sum of two; it may reuse the first.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.roots: list[Root[T]] = []
        """The sums of the largest subtrees whose parts are all here, in the order of the parts."""

    def push(self, value: T, number: int, level: int = 0) -> None:
        """Take in the part, or the whole subtree, that follows the last one."""
        while self.roots and number % 2 and self.roots[-1][:2] == (level, number - 1):
            value = self._add(self.roots.pop().value, value)
            level, number = level + 1, number // 2
        self.roots.append(Root(level, number, value))

    def left_of(self, part: int) -> T | None:
        """Give the part to the left back, if this is its right neighbour and it is the last."""
        if part % 2 and self.roots and self.roots[-1][:2] == (0, part - 1):
            return self.roots.pop().value
        return None

    def total(self) -> T:
        """Return the sum of all parts, once they are all here, from part 0 on."""
        value = self.roots.pop().value
        while self.roots:
            value = self._add(self.roots.pop().value, value)
        return value


def roots_over(parts: Iterable[int]) -> list[Root[None]]:
    """Return the largest subtrees of consecutive parts; of n parts they are at most 2·log2(n)."""
    tree: TreeSum[None] = TreeSum(lambda _left, _right: None)
    for part in parts:
        tree.push(None, part)
    return tree.roots


def add_up(values: Iterable[T], add: Callable[[T, T], T]) -> T:
    """Return the sum of the values of parts 0, 1, 2 …, of which there is at least one."""
    tree = TreeSum(add)
    for part, value in enumerate(values):
        tree.push(value, part)
    return tree.total()
