"""Servers on 127.0.0.1 in a tracker's place: one that never answers, one of errors, a small W&B."""

import contextlib
import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """An HTTP server that asks `answer(method, path, body)` for (status, body)."""

    def __init__(self, port=0):
        server = self
        self.asked = []
        self.closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                server.asked.append((self.command, self.path))
                found = server.answer(self.command, self.path, body)
                if found is None:
                    self.close_connection = True
                    return
                status, answer = found
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(OSError):  # the client hung up, or was killed
                    super().handle()

        for method in ("GET", "POST", "PUT", "HEAD", "PATCH"):
            setattr(Handler, f"do_{method}", Handler.handle_any)
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def answer(self, method, path, body):
        raise NotImplementedError

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Silent(Server):
    """Accepts and never answers; asked whether it is there, it does, if it is so told."""

    def __init__(self, *, is_there):
        super().__init__()
        self._is_there = is_there

    def answer(self, method, path, body):
        if method == "HEAD" and self._is_there:
            return 200, b""
        self.closing.wait()
        return None


class Errors(Server):
    def answer(self, method, path, body):
        return 500, b'{"errors": [{"message": "all is lost"}]}'


class Wandb(Server):
    """As much of W&B's server as the client needs to log a run."""

    def __init__(self, state=None, port=0):
        super().__init__(port)
        self.runs = state if state is not None else {}
        """Run id → {"history": [rows], "config": …, "tags": …, "inserted": how often begun}."""
        self.dead = None
        """The error that it answers with from some time on."""
        self.died = threading.Event()
        self.dies_with_history = None
        """Set, the error with which it answers the next rows, and whatever comes after."""

    def answer(self, method, path, body):
        if self.dies_with_history is not None and b"wandb-history.jsonl" in body:
            self.dead = self.dies_with_history
            self.died.set()
        if self.dead is not None:
            return self.dead, b'{"error": "no more"}'
        if path == "/graphql":
            query = json.loads(body)
            return 200, json.dumps({"data": self._graphql(query)}).encode()
        if path.endswith("/file_stream"):
            self._take(path.split("/")[4], json.loads(body))
        return 200, b"{}"

    def _graphql(self, query):
        name, variables = query.get("operationName"), query.get("variables") or {}
        viewer = {"id": "v", "entity": "me", "username": "me", "email": "", "flags": "{}"}
        viewer["teams"] = {"edges": []}
        if name == "UpsertBucket":
            return {"upsertBucket": self._upsert(variables)}
        if name == "RunResumeStatus":
            return {"model": self._resume_status(variables["name"])}
        if name == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/upload"} for f in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {"viewer": viewer, "entity": None}

    def _upsert(self, variables):
        run = self.runs.setdefault(
            variables["name"], {"history": [], "inserted": 0, "config": {}, "tags": None}
        )
        run["inserted"] += 1
        run["project"] = variables.get("project") or run.get("project")
        if variables.get("config"):
            run["config"] |= json.loads(variables["config"])
        run["tags"] = variables.get("tags") or run["tags"]
        run["summary"] = json.loads(variables.get("summaryMetrics") or "null") or run.get("summary")
        project = {"id": "p", "name": run["project"], "entity": {"id": "e", "name": "me"}}
        shown = {"displayName": variables["displayName"], "description": "", "sweepName": None}
        bucket = _bucket(variables["name"], run) | shown | {"project": project}
        return {"bucket": bucket, "inserted": run["inserted"] == 1}

    def _resume_status(self, name):
        if name not in self.runs:
            return None
        tail = {"historyTail": json.dumps(self.runs[name]["history"][-1:]), "eventsTail": "[]"}
        bucket = _bucket(name, self.runs[name]) | tail | {"logLineCount": 0, "eventsLineCount": 0}
        bucket |= {"summaryMetrics": "{}", "displayName": name, "tags": [], "notes": None}
        bucket["wandbConfig"] = '{"t": 1}'
        return {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": bucket}

    def _take(self, name, body):
        files = body.get("files") or {}
        history = files.get("wandb-history.jsonl")
        if history:
            rows = self.runs[name]["history"]
            rows[history["offset"] :] = history["content"]

    def rows(self, name):
        return [json.loads(row) for row in self.runs[name]["history"]]


def _bucket(name, run):
    return {"id": "r", "name": name, "config": "{}", "historyLineCount": len(run["history"])}
