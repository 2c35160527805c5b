"""A web server on 127.0.0.1 that misbehaves as it is told to, and remembers what it was asked."""

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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


@dataclass(kw_only=True)
class Asked:
    """One request that came: what for, from which byte, in which encoding; how much it got."""

    name: str
    start: int | None
    encoding: str | None = None
    num_sent: int = 0


class Mirror:
    """A server for `files`; the i-th request gets the i-th answer, later ones the last."""

    def __init__(self, files, *answers):
        self.files = files
        self.answers = answers or (Answer(),)
        self.asked = []
        self._closing = threading.Event()
        self._lock = threading.Lock()
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                mirror._answer(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # so that closing waits for every handler
        self.url = f"http://127.0.0.1:{self._server.server_port}/data/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, handler):
        start = handler.headers.get("Range")
        asked = Asked(
            name=handler.path.removeprefix("/data/"),
            start=int(start.removeprefix("bytes=").removesuffix("-")) if start else None,
            encoding=handler.headers.get("Accept-Encoding"),
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
                    self._closing.wait(answer.pause_s)
        except ConnectionError:
            return  # the client hung up
        if answer.stalls:
            self._closing.wait()
