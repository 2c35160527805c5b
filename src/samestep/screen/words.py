"""Words and lines of what is shown to people."""

import textwrap
from collections.abc import Iterable, Iterator


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 rank, 1,000 ranks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(number: float) -> str:
    """Return a number in at most five characters: 942, 9.42k, 94.2k, 9.42M."""
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def size(num_bytes: int) -> str:
    """Return bytes in decimal units: 942 bytes, 9.42 kB, 94.2 MB, 9.42 GB."""
    if num_bytes < 1000:
        return count(num_bytes, "byte")
    number = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 999.5:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} TB"


def duration(seconds: float) -> str:
    """Return seconds as H:MM:SS, or M:SS below an hour; fewer than ten as such: 0.4 s."""
    if seconds < 9.5:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ranks(sizes: Iterable[int]) -> str:
    """Return numbers of ranks as a sentence has them, at least one: 1 rank; 1, 2 and 3 ranks."""
    sizes = list(sizes)
    *most, last = map(str, sizes)
    text = f"{', '.join(most)} and {last}" if most else last
    return f"{text} rank{'' if sizes == [1] else 's'}"


def wrapped(text: str, indent: str = "", width: int = 80) -> Iterator[str]:
    """Yield a text as lines; all but the first begin with the indent."""
    yield from textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
