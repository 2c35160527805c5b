"""The lessons: the code that a page shows is the example's own, and every step has its place."""

import ast
import re
import sys
import textwrap
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEPS = {
    "Spiral with Lightning on Slurm": 48,
    "MNIST profiling": 42,
    "MNIST on torchrun and Slurm": 49,
    "CIFAR-10 with Lightning in a notebook": 55,
    "DDP trainer guide (cricket)": 51,
}
"""The lessons of docs/examples/lessons.md, and the number of their steps."""
PAGES = sorted((ROOT / "docs" / "examples").glob("*.md"))
LESSONS = ("spiral-lightning", "mnist-profiling", "plain-slurm", "cifar10-lightning", "cricket-ddp")
EXAMPLES = ("spiral_lightning", "mnist_profiling", "mnist_torchrun", "cifar10_lightning")
EXAMPLES += ("cricket_ddp",)
BLOCK = re.compile(r"^```(\w+)(?: title=\"(\S+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = re.compile(r"^ *(?:# )?…$", re.MULTILINE)
"""A line that stands for lines which an excerpt leaves out."""


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_shows_no_code_that_is_in_no_file(lesson):
    blocks = BLOCK.findall((ROOT / "docs" / "examples" / f"{lesson}.md").read_text())
    loose = [code for language, path, code in blocks if language in ("python", "bash") and not path]
    assert not loose


NAMED = re.compile(r"`((?:benchmarks|docs|examples|src|tests)/[^`\s]+)`(?: `([^`]+)`)?")
"""A file of a step, and what to look for in it."""


def steps() -> dict[str, list[list[str]]]:
    """Return the rows of each lesson's table: step, page, and file or reason."""
    parts = (ROOT / "docs" / "examples" / "lessons.md").read_text().split("\n## ")[1:]
    rows = {}
    for part in parts:
        lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
        cells = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
        rows[part.splitlines()[0]] = list(cells)
    return rows


def test_every_step_has_its_page_its_file_its_words_and_its_excerpt():
    found = steps()
    assert {lesson: len(rows) for lesson, rows in found.items()} == STEPS
    for step, page, files in (row for rows in found.values() for row in rows):
        assert re.search(r"\]\([^)]+\)", page), step  # where it leads to: test_docs.py
        assert NAMED.search(files) or files.startswith("On purpose: "), step
    for step, _, files in (row for rows in steps().values() for row in rows):
        for path, names in NAMED.findall(files):
            assert (ROOT / path).exists(), f"{step}: {path}"
            text = (ROOT / path).read_text()
            missing = [name for name in names.split() if name not in text]
            assert not missing, f"{step}: {missing} not in {path}"
    excerpts = [
        (page, path, code)
        for page in PAGES
        for _, path, code in BLOCK.findall(page.read_text())
        if path
    ]
    assert {page.stem for page, *_ in excerpts} >= set(LESSONS)
    for page, path, code in excerpts:
        source = (ROOT / path).read_text()
        for part in LEFT_OUT.split(textwrap.dedent(code)):
            lines = textwrap.dedent(part).strip("\n")
            indents = (textwrap.indent(lines, " " * depth) for depth in range(0, 17, 4))
            found = next((text for text in indents if f"\n{text}\n" in f"\n{source}"), None)
            assert found is not None, f"{page.name} shows what is not in {path}:\n{lines}"
            source = source.partition(found)[2]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_requirements_of_an_example_name_every_package_that_it_imports(example):
    folder = ROOT / "examples" / example
    own = {path.stem for path in folder.glob("*.py")} | set(sys.stdlib_module_names)
    trees = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    modules = {name.name for node in trees if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module or "" for node in trees if isinstance(node, ast.ImportFrom)}
    tops = {module.split(".")[0] for module in modules} - own
    assert "torch" in tops
    named = (folder / "requirements.txt").read_text()
    packages = packages_distributions()
    for top in tops:
        known = packages.get(top, [top])
        assert any(
            re.search(rf"^(# )?{name}\b", named, re.MULTILINE | re.IGNORECASE) for name in known
        ), top
