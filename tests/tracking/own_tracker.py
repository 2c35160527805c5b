"""A tracker for tests: it writes down what it is given, and misbehaves where it is told to.

TRACKER_FAULT="WHERE:WHAT" says where (import, start, record, later record, finish) and what (raise,
hang, kill, exit, or mute: hang without a word); `start:wait` waits until the training has ended.
It writes beside the run directory, as a service would, so that what a second process sends is added
to it.
"""

import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path

from samestep.show.tracking import Started


def fault(where, run=None):
    place, _, what = os.environ.get("TRACKER_FAULT", "").partition(":")
    if place != where:
        return
    if what == "raise":
        raise ConnectionError(f"the service has gone at {where}")
    if what == "hang":
        threading.Event().wait()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        sys.exit("the tracker thinks that it is alone")
    if what == "mute":
        os.closerange(0, 100)
        threading.Event().wait()
    if what == "wait":
        pause = threading.Event()
        while b'"event": "stop"' not in (run.path / "events.jsonl").read_bytes():
            pause.wait(0.01)


class Service:
    def __init__(self, run):
        self.path = run.path.parent / f"{run.path.name}.service"

    def write(self, **line):
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def start(run):
    fault("start", run)
    service = Service(run)
    told = ("known", "project", "name", "tags", "workspace", "offline")
    facts = {"settings": dict(run.settings), "facts": dict(run.facts), "pid": os.getpid()}
    facts |= {"group": os.getpgrp(), "has_torch": "torch" in sys.modules}
    service.write(what="start", **{name: getattr(run, name) for name in told}, **facts)
    link = os.environ.get("TRACKER_LINK", "https://tracker.example/the-run")
    return Started(client=service, run="the run", link=link)


calls = itertools.count()


def record(client, entries):
    fault("later record" if next(calls) else "record")
    for entry in entries:
        told = {name: getattr(entry, name) for name in ("step", "epoch", "axis", "time")}
        file = entry.file and entry.file.name
        client.write(what=entry.event, **told, values=dict(entry.values), file=file)


def finish(client, result):
    fault("finish")
    client.write(what="finish", status=result.status, values=dict(result.values))


fault("import")


def lines(run: Path, service="service"):
    path = run.parent / f"{run.name}.{service}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
