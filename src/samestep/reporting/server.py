"""A run's page on this machine alone, which redraws itself while the run goes on."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from samestep.errors import UserError
from samestep.reporting.collect import Report, collect
from samestep.reporting.page import news, render
from samestep.run.records import SYSTEM

HOST = "127.0.0.1"
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SHARE = 0.1
"""Of a core's time that reading a run may take: of a long run it takes seconds, and the training
may need that core."""
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
        self.report()  # there is a run, or the user is told so now
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
        """Return what the run tells now; its files are read again only if they have changed."""
        with self._lock:
            now = self._state()
            # That a run was killed changes no file, so one that goes on is always read.
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
        found: list[int] = []
        for name in ("events.jsonl", "result.json", SYSTEM, "pictures/pictures.json"):
            try:
                stat = (self._run / name).stat()
            except OSError:
                continue
            found += [stat.st_mtime_ns, stat.st_size]
        return tuple(found)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of two paths, from pages of this machine alone."""

    server: RunServer
    server_version, sys_version = "samestep", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Send the page or its news."""
        if not self._is_local():
            self._send(403, _TEXT, "This page is for localhost alone.\n")
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

    def _is_local(self) -> bool:
        """Whether it was asked for by a name of this machine.

        Else a page elsewhere could make its own name lead here, and read the answer.
        """
        name, colon, port = self.headers.get("Host", "").rpartition(":")
        if not colon or not port.isdigit():
            name = self.headers.get("Host", "")
        return name.lower() in _NAMES

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
