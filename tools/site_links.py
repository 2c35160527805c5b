"""Let the handbook's site show the files outside docs/ that its pages link to; a hook of MkDocs.

Pages link to examples and results as they lie in the repository. The site gets copies of these
files under source/; Markdown among them becomes pages. A link to a folder becomes plain text.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)]*)?\)")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def _targets(page: Path) -> set[Path]:
    """Return the files outside docs/ that a page links to."""
    prose = FENCED.sub("", page.read_text())
    found = {Path(os.path.normpath(page.parent / target)) for _, target, _ in LINK.findall(prose)}
    return {path for path in found if path.is_file() and not path.is_relative_to(DOCS)}


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that are linked to, and those that these link to."""
    todo, seen = [*DOCS.rglob("*.md")], set[Path]()
    while todo:
        new = _targets(todo.pop()) - seen
        seen |= new
        todo += [path for path in new if path.suffix == ".md"]
    for path in sorted(seen):
        uri = f"source/{path.relative_to(ROOT)}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page to where the site has their files."""
    here = Path(page.file.abs_src_path)
    shown = DOCS / page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(here.parent / target))
        if path.is_dir():
            return label
        there = path if path.is_relative_to(DOCS) else DOCS / "source" / path.relative_to(ROOT)
        return f"[{label}]({os.path.relpath(there, shown.parent)}{anchor})"

    parts = FENCED.split(markdown)
    return "".join(p if p.startswith("```") else LINK.sub(moved, p) for p in parts)
