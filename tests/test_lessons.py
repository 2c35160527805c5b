"""The lessons: the code that a page shows is the example's own, and every step has its place."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEPS = 0
PAGES = sorted((ROOT / "docs").glob("*.md"))
LESSONS = ("spiral-lightning", "mnist-profiling", "plain-slurm", "cifar10-lightning")
BLOCK = re.compile(r"^```(\w+)(?: title=\"(\S+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = re.compile(r"^ *(?:# )?…$", re.MULTILINE)
"""A line that stands for lines which an excerpt leaves out."""


def test_an_excerpt_is_found_word_for_word_in_the_file_that_it_names():
    excerpts = [
        (page, path, code)
        for page in PAGES
        for _, path, code in BLOCK.findall(page.read_text())
        if path
    ]
    for page, path, code in excerpts:
        source = (ROOT / path).read_text()
        for part in LEFT_OUT.split(textwrap.dedent(code)):
            lines = textwrap.dedent(part).strip("\n")
            indents = (textwrap.indent(lines, " " * depth) for depth in range(0, 17, 4))
            found = next((text for text in indents if f"\n{text}\n" in f"\n{source}"), None)
            assert found is not None, f"{page.name} shows what is not in {path}:\n{lines}"
            source = source.partition(found)[2]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_shows_no_code_that_is_in_no_file(lesson):
    blocks = BLOCK.findall((ROOT / "docs" / f"{lesson}.md").read_text())
    loose = [code for language, path, code in blocks if language in ("python", "bash") and not path]
    assert not loose


def test_each_step_of_the_five_lessons_has_its_page_and_its_file():
    parts = (ROOT / "docs" / "lessons.md").read_text().split("\n## ")[1:]
    assert len(parts) == 5
    rows = [
        line.strip("|").split("|") for line in "\n".join(parts).splitlines() if line[:2] == "| "
    ]
    steps = [row for row in rows if row[0].strip() != "step of the lesson"]
    assert len(steps) >= STEPS
    for step, page, files in steps:
        assert re.search(r"\]\([^)]+\)", page), step
        for name in re.findall(r"`((?:benchmarks|docs|examples|src)/[^`\s]+)`", files):
            assert (ROOT / name).exists(), f"{step}: {name}"
