"""The handbook as a site: strict, and complete without a server or a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import needs

ROOT = Path(__file__).parent.parent
pytestmark = [needs("mkdocs"), pytest.mark.slow]
TAG = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?([^\"\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return out


def test_each_page_of_the_handbook_is_in_it(site):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert all((site / page).with_suffix(".html").is_file() for page in pages)
    named = (ROOT / "mkdocs.yml").read_text()
    assert {str(page) for page in pages if f"{page}\n" not in named} == {
        str(page) for page in pages if page.parent.name == "check"
    }


def test_what_a_page_loads_is_a_file_of_the_site(site):
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # served only by a server
        for target in TAG.findall(page.read_text()):
            path = target.partition("#")[0].partition("?")[0]
            found = target.startswith("data:") or not path or (page.parent / path).exists()
            assert found, f"{page.relative_to(site)}: {target}"


def test_no_page_shows_markup_that_the_site_cannot_draw(site):
    """A bar in the code of a table has no backslash, and a drawing is a picture."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<td[^>]*>.*?<code>[^<]*\\\|", text), page
        assert "<code>flowchart" not in text, page
        assert "language-mermaid" not in text, page


def test_the_columns_of_a_table_of_flags_keep_their_headings_on_a_narrow_screen(site):
    text = (site / "reference" / "settings.html").read_text()
    row = text[text.index('<span class="whole">--warmup-steps</span>') :].partition("</tr>")[0]
    assert '<td data-label="default"><code>0</code></td>' in row
    assert '<td data-label="on resume">' in row
