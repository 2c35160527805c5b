"""Read back what the trackers' own clients wrote into a run directory."""

import json
import struct
import warnings
import zipfile
from pathlib import Path

HEADER, BLOCK = 7, 32_768


def wandb_records(run: Path, kind: str):
    """Return the records of a kind in each .wandb file of a run, in the order they were begun."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((run / "tracking" / "wandb").glob("wandb/offline-run-*/*.wandb"))
    written = (data for file in files for data in _leveldb_records(file.read_bytes()))
    records = map(Record.FromString, written)
    return [getattr(r, kind) for r in records if r.WhichOneof("record_type") == kind]


def _leveldb_records(data: bytes):
    """Yield the records of a LevelDB log with W&B's header of 7 bytes."""
    assert data[:4] == b":W&B"
    place, pieces = HEADER, []
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK  # too little is left of a block for a header
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, place)
        pieces.append(data[place + HEADER : place + HEADER + length])
        place += HEADER + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield b"".join(pieces)
            pieces = []


def wandb_rows(run: Path):  # return the rows that `run.log` wrote, as tables
    return [
        {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in row.item}
        for row in wandb_records(run, "history")
    ]


def wandb_updates(run: Path, field: str):
    """Return the names and values that records of one kind set."""
    updates = [u for record in wandb_records(run, field) for u in record.update]
    return {u.key or u.nested_key[0]: json.loads(u.value_json) for u in updates}


def wandb_axes(run: Path):  # return metric name or pattern → the metric that it is drawn over
    return {d.glob_name or d.name: d.step_metric for d in wandb_records(run, "metric")}


def comet_messages(run: Path):
    """Return each Comet archive of a run, oldest first: (experiment.json, its messages)."""
    found = []
    for path in (run / "tracking" / "comet").glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("experiment.json"))
            lines = archive.read("messages.json").decode().splitlines()
            found.append((about, [json.loads(line) for line in lines]))
    return sorted(found, key=lambda pair: pair[0]["start_time"])


def comet_metrics(run: Path):
    """Return (name, step, epoch, value) of each metric, in order; without Comet's own."""
    messages = [m for _, part in comet_messages(run) for m in part if m["type"] == "metric_msg"]
    metrics = [m["payload"]["metric"] for m in messages]
    return [
        (m["metricName"], m["step"], m["epoch"], m["metricValue"])
        for m in metrics
        if "/" in m["metricName"]
    ]


def tensorboard(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tracking" / "tensorboard"), size_guidance={"scalars": 0})
    return reader.Reload()


def mlflow_store(run: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what MLflow uses of SQLAlchemy is deprecated
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{run}/tracking/mlflow/mlflow.db")


def files_with(secret: str, folder: Path):
    """Return the files below a folder that hold a secret, also packed in an archive."""
    found = []
    for path in (p for p in folder.rglob("*") if p.is_file()):
        contents = [path.read_bytes()]
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        found += [path for content in contents if secret.encode() in content]
    return found


def numbers(table, prefix=""):
    """Yield (name, number) of a record, those of nested tables with a slash in the name."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            yield prefix + key, value


def expected(run: Path):
    """Return what a tracker has to have: series name → [(step, epoch, values by their name)]."""
    from samestep import read_records

    series = {}
    for written in read_records(run):
        record = written
        event = record["event"]
        if event not in ("step", "epoch", "evaluation"):
            continue
        name = {"step": "train", "evaluation": record.get("split")}.get(event, event)
        if event == "epoch":
            record = {**record, "metrics": None, **record.get("metrics", {})}
        values = {
            f"{name}/{key}": value for key, value in numbers(record) if key not in ("step", "epoch")
        }
        series.setdefault(name, []).append((record["step"], record["epoch"], values))
    return series
