"""Write what the rules of `samestep check` say into the handbook: python tools/check_pages.py.

Title, severity and reason of a code have their only source in its rule; the rest of its page is
written by hand.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import samestep.checking.rules  # noqa: F401 - registers them
from samestep.checking.findings import RULES

DOCS = Path(__file__).parent.parent / "docs"
_FENCE = "```"
_TABLE = "| code | severity | what is wrong |\n|---|---|---|\n"


def outdated() -> Iterator[tuple[Path, str]]:
    """Yield each file that does not say what the rules say, and what it has to be."""
    for code, rule in sorted(RULES.items()):
        page = DOCS / "reference" / "check" / f"{code}.md"
        _, fence, example = page.read_text().partition(_FENCE)
        why = textwrap.fill(f"**{rule.severity}** · {rule.why}", 120, break_on_hyphens=False)
        text = f"# {code}: {rule.title}\n\n{why}\n\n{fence}{example}"
        if text != page.read_text():
            yield page, text
    chapter = DOCS / "how-to" / "check.md"
    before, heading, after = chapter.read_text().partition(_TABLE)
    rows = [
        f"| [{code}](../reference/check/{code}.md) | {rule.severity} | {rule.title} |\n"
        for code, rule in sorted(RULES.items())
    ]
    rest = after.splitlines(keepends=True)
    while rest and rest[0].startswith("|"):
        del rest[0]
    text = before + heading + "".join([*rows, *rest])
    if text != chapter.read_text():
        yield chapter, text


if __name__ == "__main__":
    for path, text in outdated():
        path.write_text(text)
        print(path)
