"""MLflow: `--track mlflow`, at MLFLOW_TRACKING_URI, or else in an SQLite file of the run's own."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy import event
from sqlalchemy.engine import Engine

from samestep.show.tracking import Server, Started, TrackedRecord, TrackedResult, TrackedRun

_MOST = 100  # parameters in one request


_Client = tuple[MlflowClient, str]  # with the run's id


def find_server() -> Server:
    """Return MLflow's server, if it is one; its credentials are variables."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return Server(address=uri if uri.startswith("http") else None)


def start(run: TrackedRun) -> Started:
    """Open the run: MLflow names it, so one that was begun here is found by a tag with our id."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    place = None
    if run.offline:
        uri, place = f"sqlite:///{run.folder}/mlflow.db", f"file://{run.folder}/artifacts"
        if run.known is None:  # a store that was killed while it was made cannot be opened
            (run.folder / "mlflow.db").unlink(missing_ok=True)
        # SQLite need not wait for the disk: what it holds is in events.jsonl too.
        event.listen(Engine, "connect", lambda link, _: link.execute("PRAGMA synchronous=OFF"))
    store = MlflowClient(uri)
    tracked = _find(store, run)
    lines = None
    if tracked is None:
        there = store.get_experiment_by_name(run.project)
        number = there.experiment_id if there else store.create_experiment(run.project, place)
        found_by = {"samestep.id": run.id}  # from its first moment on: this process may be killed
        tracked = store.create_run(number, int(run.started_at * 1000), found_by, run.name)
        lines = 0  # whatever another server has of it, this one has nothing
    identifier, number = tracked.info.run_id, tracked.info.experiment_id
    tags = {"tags": ", ".join(run.tags)} if run.tags else {}
    tags |= {f"facts.{key}": str(value) for key, value in run.facts.items()}
    # A parameter cannot change; a setting that did, when the run was resumed, becomes a tag.
    tags |= {
        f"resumed.{key}": str(value)
        for key, value in run.settings.items()
        if tracked.data.params.get(_name(key), str(value)) != str(value)
    }
    params = {_name(key): str(value) for key, value in run.settings.items()}
    new = [Param(key, value) for key, value in params.items() if key not in tracked.data.params]
    for first in range(0, max(len(new), 1), _MOST):
        store.log_batch(identifier, params=new[first : first + _MOST])
    store.log_batch(identifier, tags=[RunTag(_name(k), v) for k, v in tags.items()])
    store.update_run(identifier, status="RUNNING")
    link = f"{uri.rstrip('/')}/#/experiments/{number}/runs/{identifier}" if "http" in uri else uri
    return Started(client=(store, identifier), run=identifier, link=link, lines=lines)


def _find(store: MlflowClient, run: TrackedRun) -> Run | None:
    """Return the run as it was left, whichever experiment it is in; None if it is not here."""
    if run.known is not None:
        with contextlib.suppress(MlflowException):
            return store.get_run(run.known)
    experiment = store.get_experiment_by_name(run.project)
    if experiment is None:
        return None
    runs = store.search_runs([experiment.experiment_id], f"tags.`samestep.id` = '{run.id}'")
    return runs[0] if runs else None


def _name(text: str) -> str:
    return re.sub(r"[^/\w.\- ]", "_", text)


def record(client: _Client, entries: Sequence[TrackedRecord]) -> None:
    """Log the metrics in few requests; the same ones once more would change nothing."""
    store, run = client
    metrics = []
    for entry in entries:
        if entry.file is not None and entry.file.is_file():
            store.log_artifact(run, str(entry.file), "checkpoints")
        if entry.picture is not None and (content := entry.picture.png()):
            with TemporaryDirectory() as folder:
                image = Path(folder, f"{entry.picture.name}.png")
                image.write_bytes(content)
                store.log_artifact(run, str(image), "pictures")
        metrics += [
            Metric(_name(key), value, int(entry.time * 1000), entry.at)
            for key, value in entry.values.items()
        ]
    for first in range(0, len(metrics), 1000):
        store.log_batch(run, metrics=metrics[first : first + 1000])


def finish(client: _Client, result: TrackedResult) -> None:
    """Log the result as tags, and close the run."""
    store, run = client
    tags = [RunTag(_name(f"result.{key}"), str(value)) for key, value in result.values.items()]
    store.log_batch(run, tags=tags)
    status = {"completed": "FINISHED", "failed": "FAILED"}.get(result.status, "KILLED")
    store.set_terminated(run, status)
