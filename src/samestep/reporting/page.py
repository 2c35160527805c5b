"""The page as one file of HTML: style, script and data are in it, nothing is outside."""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from samestep.errors import UserError
from samestep.reporting import scaling
from samestep.reporting.collect import Report, collect
from samestep.run.files import write_text
from samestep.version import __version__

_HERE = Path(__file__).parent
_JSON_ESCAPES = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})
_EVERY_MS = 2000
"""How often a page that is watched asks for news."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page, and what a browser may do with it."""

    html: str
    policy: str
    """Its Content-Security-Policy."""


def render(report: Report, *, live: bool = False) -> Page:
    """Return the page of a report; a live one asks its server for news and redraws itself."""
    assets = _HERE / "assets"
    library, script, *styles = (
        (assets / name).read_text(encoding="utf-8")
        for name in ("uplot/uPlot.iife.min.js", "page.js", "uplot/uPlot.min.css", "page.css")
    )
    style = "".join(styles)
    galleries = [run.gallery for run in report.runs if run.gallery]
    frames = [p.html for gallery in galleries for p in gallery.pictures if p.kind == "html"]
    policy = _policy([library, script, *_scripts(frames)], style, framed=bool(frames), live=live)
    html = _template("report.html.j2").render(
        report=report,
        policy=policy,
        style=Markup(style),  # noqa: S704 - samestep's own file
        library=Markup(library),  # noqa: S704 - same
        script=Markup(script),  # noqa: S704 - same
        data=_as_json({"charts": [chart.as_json() for chart in report.charts]}),
        live=_as_json({"every_ms": _EVERY_MS} if live else None),
        version=__version__,
        scaling=scaling,
    )
    # The name of a file on Linux may hold what UTF-8 cannot.
    return Page(html=html.encode("utf-8", "replace").decode(), policy=policy)


def news(report: Report) -> dict[str, Any]:
    """Return what a live page replaces: data of its charts, and its sections as HTML."""
    return {
        "ended": report.ended,
        "status": ", ".join(run.status for run in report.runs),
        "charts": [chart.as_json() for chart in report.charts],
        "body": _template("body.html.j2").render(report=report, scaling=scaling),
    }


def _as_json(value: object) -> Markup:
    """Return JSON that may stand inside of a script element, whatever texts are in it."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.translate(_JSON_ESCAPES))  # noqa: S704 - no markup is left in it


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def _policy(scripts: list[str], style: str, *, framed: bool, live: bool) -> str:
    """Allow the page's own script and style by their hashes, images inside of it, and no more.

    A recipe's own page is in a frame, which inherits this: its scripts are allowed by their hashes
    too, and its styles cannot be listed.
    """
    parts = {
        "default-src": "'none'",
        "script-src": " ".join(dict.fromkeys(map(_hash, scripts))),
        "style-src": "'unsafe-inline'" if framed else _hash(style),
        "img-src": "data:",
        **({"connect-src": "'self'"} if live else {}),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


class _Scripts(HTMLParser):
    """Collects what stands between the script tags of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script" and "src" not in dict(attrs)
        if self._inside:
            self.found.append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"


def _scripts(pages: list[str]) -> list[str]:
    parser = _Scripts()
    for page in pages:
        known = len(parser.found)
        try:
            # As a browser reads it: a carriage return is a line feed.
            parser.feed(re.sub(r"\r\n?", "\n", page))
            parser.close()
        except AssertionError:  # of Python's parser, for markup that it does not know
            del parser.found[known:]
        parser.reset()
    return parser.found


NAME = "report.html"


def write_report(
    paths: Sequence[Path], output: Path | None = None, target: float | None = None
) -> Path:
    """Write the page of some runs, and return its path.

    By default it is `report.html` in the directory of a single run, else in the current one.
    """
    single = len(paths) == 1 and paths[0].is_dir()
    file = output or (paths[0] / NAME if single else Path(NAME))
    if file.is_dir():
        raise UserError(f"-o {file} is a directory; name a file in it: -o {file / NAME}")
    if output is not None and not file.parent.is_dir():
        raise UserError(
            f"-o {file}: there is no directory {file.parent}; make it, or name another."
        )
    if output is not None and file.exists() and not _is_page(file):
        raise UserError(
            f"-o {file} exists and is no page that samestep has made; name another file, or "
            "delete it first."
        )
    html = render(collect(paths, target)).html
    try:
        write_text(file, html)
    except UserError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        reason = error.__cause__.strerror or error.__cause__
        raise UserError(
            f"{file} could not be written: {reason}. Name a file elsewhere: -o {NAME}"
        ) from error
    return file


def _is_page(file: Path) -> bool:
    with file.open("rb") as opened:
        return b'name="generator" content="samestep' in opened.read(4096)
