"""The handbook as a site: strict, and complete without a server or a network."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from samestep.base.plugins import __version__
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


def test_each_page_is_in_it_with_what_it_loads_and_shows_no_markup(site):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert all((site / page).with_suffix(".html").is_file() for page in pages)
    named = (ROOT / "mkdocs.yml").read_text()
    assert {str(page) for page in pages if f"{page}\n" not in named} == {
        str(page) for page in pages if page.parent.name == "check"
    }
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # served only by a server
        for target in TAG.findall(page.read_text()):
            path = target.partition("#")[0].partition("?")[0]
            found = target.startswith("data:") or not path or (page.parent / path).exists()
            assert found, f"{page.relative_to(site)}: {target}"
    text = (site / "source" / "examples" / "cifar10_lightning" / "walkthrough.html").read_text()
    assert 'id="12-testing-the-best-checkpoint"' in text
    assert "10,000 test images" in text
    assert "data:image/png;base64," in text
    lesson = (site / "examples" / "cifar10-lightning.html").read_text()
    assert 'href="../source/examples/cifar10_lightning/walkthrough.html"' in lesson
    text = (site / "reference" / "settings.html").read_text()
    row = text[text.index('<span class="whole">--warmup-steps</span>') :].partition("</tr>")[0]
    assert '<td data-label="default"><code>0</code></td>' in row
    assert '<td data-label="on resume">' in row
    assert f"samestep {__version__}" in (site / "index.html").read_text()
    offer = 'href="../source/examples.zip"'
    assert offer in (site / "examples" / "mnist-profiling.html").read_text()
    assert offer not in (site / "concepts" / "checkpoints.html").read_text()
    with zipfile.ZipFile(site / "source" / "examples.zip") as archive:
        assert "examples/mnist_profiling/dataloader.py" in archive.namelist()
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r"<td[^>]*>.*?<code>[^<]*\\\|", text), page
        assert "<code>flowchart" not in text, page
        assert "language-mermaid" not in text, page


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://me:word@host.example/group/samestep.git", "https://host.example/group/samestep"),
        ("git@host.example:group/samestep.git", "https://host.example/group/samestep"),
        ("ssh://git@host.example:2222/samestep", "https://host.example/samestep"),
        *((nowhere, "") for nowhere in ("", "/srv/samestep", "../samestep", "file:///srv/git")),
    ],
)
def test_the_repository_is_where_the_clone_came_from_if_that_is_on_the_web(remote, address):
    from tools.site_face import repository

    assert repository(remote) == address
