"""Let the handbook's site show the files outside docs/ that its pages link to: hooks of MkDocs.

Pages link to examples and results as they lie in the repository. The site gets copies of these
files under source/; Markdown and notebooks among them become pages. A link to a folder becomes
plain text.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)]*)?\)")
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
BAR = re.compile(r"`[^`\n]*`")
CODE = re.compile(r"(?<!</span>)<code>([^<]+)</code>")
DRAWN = re.compile(r'<div class="language-text highlight">(?=<pre><span></span><code>[^<]*│)')
TABLE = re.compile(r"<table>(?P<head>.*?)(?P<body><tbody>.*?)</table>", re.DOTALL)
MOST_WHOLE = 28
"""A longer word of code may break at a dot, a slash, an underscore or a comma."""
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def _markdown(page: Path) -> str:
    """Return the text of a page; of a notebook, its cells and what they have printed and drawn."""
    if page.suffix != ".ipynb":
        return page.read_text()
    parts = []
    for cell in json.loads(page.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
            plain = "".join(output.get("text", "")) or data.get("text/plain", "")
            picture = data.get("image/png", "").replace("\n", "")
            drawn = f"![The picture that this cell draws](data:image/png;base64,{picture})"
            text = data.get("text/markdown", f"```text\n{plain.rstrip()}\n```")
            parts.append(drawn if picture else text)
    return "\n\n".join(parts)


def _targets(page: Path) -> set[Path]:
    """Return the files outside docs/ that a page links to."""
    prose = FENCED.sub("", _markdown(page))
    found = {Path(os.path.normpath(page.parent / target)) for _, target, _ in LINK.findall(prose)}
    return {path for path in found if path.is_file() and not path.is_relative_to(DOCS)}


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that are linked to, and those that these link to."""
    todo, seen = [*DOCS.rglob("*.md")], set[Path]()
    while todo:
        new = _targets(todo.pop()) - seen
        seen |= new
        todo += [path for path in new if path.suffix in (".md", ".ipynb")]
    for path in sorted(seen):
        uri = Path("source") / path.relative_to(ROOT)
        if path.suffix == ".ipynb":
            page = str(uri.with_suffix(".md"))
            files.append(File.generated(config, page, content=_markdown(path)))
        files.append(File.generated(config, str(uri), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page to where the site has their files."""
    shown = DOCS / page.file.src_uri
    copied = page.file.src_uri.startswith("source/")
    here = ROOT / page.file.src_uri.removeprefix("source/") if copied else shown

    def moved(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(here.parent / target))
        if path.is_dir():
            return label
        there = path if path.is_relative_to(DOCS) else DOCS / "source" / path.relative_to(ROOT)
        there = there.with_suffix(".md") if there.suffix == ".ipynb" else there
        return f"[{label}]({os.path.relpath(there, shown.parent)}{anchor})"

    def shown_part(text: str) -> str:
        # In a table GitHub wants `a \| b`, where Python-Markdown would show the backslash.
        text = ROW.sub(lambda row: BAR.sub(lambda code: code[0].replace("\\|", "|"), row[0]), text)
        return LINK.sub(moved, text)

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else shown_part(part) for part in parts)


def on_page_content(html: str, **_: Any) -> str:
    """Keep flags and names whole, where browsers break at hyphens; keep the lines of drawings."""

    def kept(word: str) -> str:
        if len(word) > MOST_WHOLE:
            return re.sub(r"(?<=[\w\])])([._/,]+)(?=\w)", r"\1<wbr>", word)
        return f'<span class="whole">{word}</span>' if "-" in word[:-1] else word

    html = TABLE.sub(_stacked, DRAWN.sub('<div class="highlight">', html))
    return CODE.sub(lambda m: f"<code>{' '.join(map(kept, m[1].split(' ')))}</code>", html)


def _stacked(table: re.Match[str]) -> str:
    """Mark a table of flags or fields: on a narrow screen its cells stand below each other."""
    heads = re.findall(r"<th>(.*?)</th>", table["head"])
    if len(heads) < 3 or not heads[-1].startswith("what it"):
        return table[0]
    cells = ["<td>", *(f'<td data-label="{head}">' for head in heads[1:-1]), "<td>"]
    rows = [row.split("<td>") for row in table["body"].split("<tr>")]
    body = "<tr>".join(
        "".join(part for pair in zip(["", *cells], row, strict=False) for part in pair)
        for row in rows
    )
    return f"<table data-stacked>{table['head']}{body}</table>"
