"""A web server on 127.0.0.1 that misbehaves as it is told to, and remembers what it was asked."""

import contextlib
import hashlib
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from samestep.core.data.catalog import RemoteDataset, RemoteFile


def md5(data):
    return hashlib.md5(data).hexdigest()


def listed(name, data):
    return RemoteFile(name, md5(data), len(data))


def data_set(name, *files):
    return RemoteDataset(name=name, files=files, mirrors=(), description="", licence="", source="")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


class Loopback:  # an HTTP server on this machine whose `respond(handler)` answers each request
    protocol, waits_for_handlers = "HTTP/1.0", True

    def __init__(self):
        server = self
        self.asked = []
        self.closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = server.protocol

            def handle_any(self):
                server.respond(self)

            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(OSError):  # the client hung up, or was killed
                    super().handle()

        for method in ("GET", "POST", "PUT", "HEAD", "PATCH"):
            setattr(Handler, f"do_{method}", Handler.handle_any)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = not self.waits_for_handlers
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def respond(self, handler):
        raise NotImplementedError

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int = 200
    body: bytes | None = None
    """What to send in place of the file."""
    knows_range: bool = True
    stop_after: int | None = None
    """Send only so many bytes, then ..."""
    stalls: bool = False
    """... say nothing until the server closes, or else hang up."""
    piece_bytes: int | None = None
    """Send in pieces of this size, ..."""
    pause_s: float = 0.0
    """... with this pause between them."""
    headers: tuple[tuple[str, str], ...] = ()
    content_range: str | None = None
    says_length: bool = True


class Mirror(Loopback):
    """A server for `files`; the i-th request gets the i-th answer, later ones the last.

    Of each request, `asked` has what for, from which byte, in which encoding, how much it got.
    """

    def __init__(self, files, *answers):
        super().__init__()
        self.files = files
        self.answers = answers or (Answer(),)
        self._lock = threading.Lock()
        self.url += "/data/"

    def respond(self, handler):
        start = handler.headers.get("Range")
        asked = SimpleNamespace(
            name=handler.path.removeprefix("/data/"),
            start=int(start.removeprefix("bytes=").removesuffix("-")) if start else None,
            encoding=handler.headers.get("Accept-Encoding"),
            num_sent=0,
        )
        with self._lock:
            answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
            self.asked.append(asked)
        if answer.status != 200:
            handler.send_error(answer.status)
            return
        body = self.files[asked.name] if answer.body is None else answer.body
        total, begin = len(body), asked.start if answer.knows_range else None
        if begin is not None and begin >= total:
            handler.send_error(416)
            return
        handler.send_response(200 if begin is None else 206)
        body = body[begin or 0 :]
        if begin is not None:
            usual = f"bytes {begin}-{total - 1}/{total}"
            handler.send_header("Content-Range", answer.content_range or usual)
        if answer.says_length:
            handler.send_header("Content-Length", str(len(body)))
        for name, value in answer.headers:
            handler.send_header(name, value)
        handler.end_headers()
        self._send(handler, asked, answer, body)

    def _send(self, handler, asked, answer, body):
        body = body[: answer.stop_after]
        step = answer.piece_bytes or max(len(body), 1)
        try:
            for first in range(0, len(body), step):
                piece = body[first : first + step]
                handler.wfile.write(piece)
                asked.num_sent += len(piece)
                if answer.pause_s:
                    self.closing.wait(answer.pause_s)
        except ConnectionError:
            return  # the client hung up
        if answer.stalls:
            self.closing.wait()
