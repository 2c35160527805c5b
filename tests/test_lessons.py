"""The lessons: the code that a page shows is the example's own, and every step has its place."""

import ast
import json
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
    for step, page, _ in (row for rows in steps().values() for row in rows):
        shown = ""
        for label, target, heading in LINK.findall(page):
            path = ROOT / "docs" / "examples" / target
            number = int((re.findall(r"section (\d+)", label) or ["0"])[0])
            notebook = path.suffix == ".ipynb"
            shown += in_notebook(path, number) if notebook else under(path, heading)
        shown = shown.lower().replace("-", "_")
        names = re.findall(r"[A-Za-z]\w+", " ".join(re.findall(r"`([^`]+)`", step)))
        names += re.findall(r"\w+_\w+|\d[\d.,]*\d", re.sub(r"^\w+: ", "", step))
        missing = {name for name in names if name.lower() not in shown}
        assert not missing, f"{step}: {page} does not show {missing}"
        words = re.findall(r"[^\W\d_]{4,}", re.sub(r"`[^`]+`|^\w+: ", "", step.lower()))
        found = [word for word in words if word[:5] in shown]
        assert len(found) >= 0.6 * len(words), f"{step}: {page} has only {found}"


LINK = re.compile(r"\[([^\]]*)\]\(([^)#]+)(?:#([^)]+))?\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def under(page: Path, heading: str) -> str:
    """Return what a page has under a heading; without one, what it begins with."""
    text = FENCED.sub(lambda block: block[0].replace("\n#", "\n"), page.read_text())
    parts = [part for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE) if part]
    named = [re.sub(r"[^\w\- ]", "", part.splitlines()[0].lower()) for part in parts]
    first = [name.strip().replace(" ", "-") for name in named].index(heading) if heading else 0
    depth = len(parts[first].split()[0]) + (not heading)
    after = (n for n, part in enumerate(parts) if n > first and part.find(" ") <= depth)
    return "".join(parts[first : next(after, None)])


def in_notebook(notebook: Path, number: int) -> str:
    """Return the cells of a section and what they print; those before section 1 are number 0."""
    now, told = 0, []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        begins = re.match(r"## (\d+)\. ", source)
        now = int(begins[1]) if begins else now
        if now == number:
            data = [output.get("data", output) for output in cell.get("outputs", ())]
            told += [source, *("".join(d.get("text/markdown", d.get("text", ""))) for d in data)]
    return "\n".join(told)


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
