"""Servers on 127.0.0.1 in a tracker's place: one that never answers, one of errors, a small W&B."""

import gzip
import json
import threading

from tests.data.loopback import Loopback


class Server(Loopback):  # a server that asks `answer(method, path, body)` for (status, body)
    protocol, waits_for_handlers = "HTTP/1.1", False

    def respond(self, handler):
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if handler.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.asked.append((handler.command, handler.path))
        found = self.answer(handler.command, handler.path, body)
        if found is None:
            handler.close_connection = True
            return
        status, answer = found
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(answer)

    def answer(self, method, path, body):
        raise NotImplementedError


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


class Wandb(Server):  # as much of W&B's server as the client needs to log a run
    def __init__(self):
        super().__init__()
        self.runs = {}
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
