"""An explanation as blocks of lines: each number with how it follows."""

from collections.abc import Iterator

from samestep.explanation.equality_text import equal_rows, others_rows
from samestep.explanation.explain import Explanation
from samestep.explanation.files_text import checkpoints_rows, evaluation_rows
from samestep.explanation.memory_text import memory_rows
from samestep.explanation.step_text import length_rows, rates_rows, step_rows, where_rows
from samestep.reporting.words import wrapped

_INDENT = 15


def lines(told: Explanation) -> Iterator[str]:
    """Yield the lines for people, of at most 80 columns."""
    blocks = {
        "where it runs": where_rows(told),
        "one step": step_rows(told),
        "length": length_rows(told),
        "learning rate": rates_rows(told),
        "memory of one rank": memory_rows(told),
        "other numbers of ranks": (*others_rows(told), *equal_rows(told)),
        "evaluation": evaluation_rows(told),
        "checkpoints": checkpoints_rows(told),
        "notes": [("note", note) for note in told.notes],
    }
    parameters = told.memory.weights.elements if told.memory else None
    known = f", {parameters:,} parameters" if parameters else ""
    yield f"{told.recipe}{known}: explained, not run. Nothing is started or written."
    for title, rows in blocks.items():
        found = list(rows)
        if found:
            yield ""
            yield title
        for name, text in found:
            yield from wrapped(f"  {name:<{_INDENT - 3}} {text}", " " * _INDENT)


def text_of(told: Explanation) -> str:
    """Return all lines as one text."""
    return "".join(f"{line.rstrip()}\n" for line in lines(told))
