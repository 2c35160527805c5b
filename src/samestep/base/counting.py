"""A bar while something is counted, such as files that are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_LINE_FROM = 5000


@contextmanager
def counting(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Show a bar on standard error; without a terminal, one line if there is much to count.

    Yields a function to call, from any thread, with how many more of this rank's `total` are done.
    Only one rank is `shown`.
    """
    console = Console(stderr=True, highlight=False)
    if not shown or not console.is_terminal:
        if shown and total >= _LINE_FROM:
            console.print(f"{what}: {total:,} on this rank", soft_wrap=True)
        yield lambda _: None
        return
    columns = (
        *(TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn()),
        *(MofNCompleteColumn(), TimeRemainingColumn(compact=True)),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda number: bar.advance(task, number)
