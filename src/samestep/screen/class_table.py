"""What a test says of each class, in a few lines: its accuracy, and what it is mistaken for."""

from collections.abc import Mapping

_MOST_CLASSES = 20
_MOST_MISTAKES = 3


def class_table(per_class: Mapping[str, float | None], confusion: list[list[int]]) -> list[str]:
    """Return a line for each class, or none where there are more than 20.

    Args:
        per_class: accuracy of each class by its name, None where it has no samples.
        confusion: counts; row by target, column by prediction, in the order of the names.
    """
    names = list(per_class)
    if not names or len(names) > _MOST_CLASSES:
        return []
    width = max(len(name) for name in names)
    lines = []
    for (name, accuracy), row in zip(per_class.items(), confusion, strict=True):
        shown = "no samples" if accuracy is None else f"{accuracy:.4f}"
        counted = sorted(zip(row, names, strict=True), key=lambda one: -one[0])
        mistakes = [f"{other} {count:,}" for count, other in counted if count and other != name]
        taken = ", ".join(mistakes[:_MOST_MISTAKES])
        lines.append(f"{name:<{width}}  {shown}{f'  taken for {taken}' if taken else ''}")
    return lines
