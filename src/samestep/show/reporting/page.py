"""The page as one file of HTML, nothing outside of it; and served while the run trains."""

import base64
import functools
import hashlib
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

import jinja2
from markupsafe import Markup

from samestep.base.errors import UserError
from samestep.base.plugins import __version__
from samestep.base.run.files import write_text
from samestep.base.run.records import SYSTEM
from samestep.show.reporting import scaling
from samestep.show.reporting.collect import Report, collect

_HERE = Path(__file__).parent
_JSON_ESCAPES = str.maketrans({"<": r"\u003c", ">": r"\u003e", "&": r"\u0026"})
_EVERY_MS = 2000  # how often a page that is watched asks for news


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page, and what a browser may do with it."""

    html: str
    policy: str  # its Content-Security-Policy


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
    # The page's own script and style by their hashes, images inside of it, and no more. A recipe's
    # own page is in a frame, which inherits this: its scripts are allowed by their hashes too, and
    # its styles cannot be listed.
    scripts = [library, script, *_scripts(frames)]
    parts = {
        "default-src": "'none'",
        "script-src": " ".join(dict.fromkeys(map(_hash, scripts))),
        "style-src": "'unsafe-inline'" if frames else _hash(style),
        "img-src": "data:",
        **({"connect-src": "'self'"} if live else {}),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    policy = "; ".join(f"{name} {value}" for name, value in parts.items())
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
    """Return the parts that a live page replaces: data of its charts, and its sections as HTML."""
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


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


class _Scripts(HTMLParser):
    """Collects what stands between the script tags of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.texts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script" and "src" not in dict(attrs)
        if self._inside:
            self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "script"


def _scripts(pages: list[str]) -> list[str]:
    parser = _Scripts()
    for page in pages:
        num_before = len(parser.texts)
        try:
            # As a browser reads it: a carriage return is a line feed.
            parser.feed(re.sub(r"\r\n?", "\n", page))
            parser.close()
        except AssertionError:  # of Python's parser, for markup that it does not know
            del parser.texts[num_before:]
        parser.reset()
    return parser.texts


NAME = "report.html"


def write_report(
    paths: Sequence[Path], output: Path | None = None, target: float | None = None
) -> Path:
    """Write the page of some runs; return its path, by default in the directory of a single run."""
    single = len(paths) == 1 and paths[0].is_dir()
    file = output or (paths[0] / NAME if single else Path(NAME))
    if file.is_dir():
        raise UserError(f"-o {file} is a directory; name a file in it: -o {file / NAME}")
    if output is not None and not file.parent.is_dir():
        raise UserError(f"-o {file}: there is no directory {file.parent}. Create it first.")
    if output is not None and file.exists() and not _is_page(file):
        raise UserError(f"-o {file} exists, and is not a samestep report. Name another file.")
    html = render(collect(paths, target)).html
    try:
        write_text(file, html)
    except UserError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        reason = error.__cause__.strerror or error.__cause__
        raise UserError(f"{file} cannot be written: {reason}. Name another: -o {NAME}") from error
    return file


def _is_page(file: Path) -> bool:
    with file.open("rb") as opened:
        return b'name="generator" content="samestep' in opened.read(4096)


HOST = "127.0.0.1"
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SHARE = 0.1
"""Fraction of a core for reading a run, which may take seconds; the training may need that core."""
_HTML, _JSON, _TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


class RunServer(ThreadingHTTPServer):
    """Serves the page of one run; it reads the run directory and writes nothing."""

    daemon_threads = True

    def __init__(self, run: Path, port: int) -> None:
        self._run = run
        self._lock = Lock()
        self._due = 0.0
        """When the run may be read again, by the monotonic clock."""
        self._read: tuple[tuple[int, ...], Report] | None = None
        self.report()  # there is a run, or the user gets the error now
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"--port {port} cannot be used on {HOST}: {reason}. Name another one, or 0 for "
                "any that is free: --port 0"
            ) from error

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def report(self) -> Report:
        """Return the run's report; its files are read again only if they have changed."""
        with self._lock:
            now = self._state()
            # That a run was killed changes no file, so one that has not ended is always read.
            stale = self._read is None or self._read[0] != now or not self._read[1].ended
            began = time.monotonic()
            if self._read is None or (stale and began >= self._due):
                self._read = now, collect([self._run])
                took = time.monotonic() - began
                self._due = began + took / _SHARE
            return self._read[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that left before its answer came."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def _state(self) -> tuple[int, ...]:
        numbers: list[int] = []
        for name in ("events.jsonl", "result.json", SYSTEM, "pictures/pictures.json"):
            try:
                stat = (self._run / name).stat()
            except OSError:
                continue
            numbers += [stat.st_mtime_ns, stat.st_size]
        return tuple(numbers)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of two paths, only for pages of this machine."""

    server: RunServer
    server_version, sys_version = "samestep", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Send the page or its news."""
        host = self.headers.get("Host", "")
        name, _, port = host.rpartition(":")
        name = name if port.isdigit() else host
        # A page elsewhere could make its own name lead here, and read the answer.
        if name.lower() not in _NAMES:
            self._send(403, _TEXT, "This page is only for localhost.\n")
            return
        try:
            if self.path == "/":
                page = render(self.server.report(), live=True)
                self._send(200, _HTML, page.html, page.policy)
            elif self.path == "/data.json":
                self._send(200, _JSON, json.dumps(news(self.server.report()), allow_nan=False))
            else:
                self._send(404, _TEXT, "There are / and /data.json.\n")
        except UserError as error:  # the run was moved or deleted meanwhile
            self._send(503, _TEXT, f"{error}\n")

    def _send(self, status: int, kind: str, text: str, policy: str = "default-src 'none'") -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: a line every two seconds would hide what matters."""
