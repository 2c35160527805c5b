"""Weights & Biases: `--track wandb`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import wandb

from samestep.base.errors import UserError
from samestep.show.tracking import Server, Started, TrackedRecord, TrackedResult, TrackedRun

COUNTS_AT_END = True  # offline, what was written counts once its file is closed


@dataclass
class _Client:
    run: Any
    measures: bool
    """Whether W&B measures the machine by itself, as it can while a training continues."""
    drawn_over_steps: set[str] = field(default_factory=set)
    system: dict[str, list[float]] = field(default_factory=dict)


def find_server() -> Server:
    """Return W&B's server and key, from wherever W&B has them."""
    settings = wandb.setup().settings
    if settings.mode != "online":
        raise UserError(f"W&B is {settings.mode}, by WANDB_MODE or its settings file")
    wandb.login(verify=False)
    return Server(address=str(settings.base_url), secrets=(settings.api_key or "",))


def start(run: TrackedRun) -> Started:
    """Open the run: its id is wrapped, so that it is the same run whenever it continues."""
    # Copies of checkpoints wait here, not in the home directory, until they are sent.
    os.environ.setdefault("WANDB_DATA_DIR", str(run.folder))
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,  # it would describe this process, not the training
        x_disable_stats=run.pid is None,
        x_stats_pid=run.pid or os.getpid(),
        init_timeout=run.timeout_s,
    )
    client = wandb.init(
        id=run.id,
        resume="allow",
        mode="offline" if run.offline else "online",
        dir=run.folder,
        project=run.project,
        entity=run.workspace,
        name=run.name,
        tags=run.tags,
        settings=settings,
    )
    facts = {f"facts.{key}": value for key, value in run.facts.items()}
    client.config.update({**run.settings, **facts}, allow_val_change=True)
    client.define_metric("step")
    client.define_metric("epoch")
    client.define_metric("epoch/*", step_metric="epoch")
    for series in ("train", "validation", "test", "pictures"):
        client.define_metric(f"{series}/*", step_metric="step")
    wrapped = _Client(client, measures=run.pid is not None)
    if run.offline:
        return Started(client=wrapped, run=run.id)
    # The server knows how far it has come, also after a kill; our lines are its steps.
    return Started(client=wrapped, run=run.id, link=client.url, lines=client.starting_step)


def record(client: _Client, entries: Sequence[TrackedRecord]) -> None:
    """Log a row an entry, but for the machine: a row has a line of events.jsonl as its number."""
    run = client.run
    for entry in entries:
        if entry.event == "system":
            for name, value in entry.values.items():
                client.system.setdefault(name, []).append(value)
        elif entry.file is not None and entry.file.is_file():
            run.log_artifact(str(entry.file), name=f"checkpoint-{run.id}", type="model")
        elif entry.picture is not None:
            if (image := entry.picture.image()) is not None:
                shown = wandb.Image(image, caption=entry.picture.title)
                name = f"pictures/{entry.picture.name}"
                run.log({name: shown, **_place(entry)}, step=entry.line)
        elif entry.values:
            # Metrics that no pattern of wrapped covers need their axis named, each once.
            new = entry.values.keys() - client.drawn_over_steps if entry.event == "metrics" else ()
            for name in new:
                if "*" not in name:  # to W&B it would be a pattern
                    run.define_metric(name, step_metric="step")
                client.drawn_over_steps.add(name)
            run.log({**entry.values, **_place(entry)}, step=entry.line)


def _place(entry: TrackedRecord) -> dict[str, Any]:
    return {"step": entry.step, "epoch": entry.epoch, "_timestamp": entry.time}


def finish(client: _Client, result: TrackedResult) -> None:
    """Write the result into the summary, and wait until all has arrived."""
    run = client.run
    run.summary.update({f"result.{key}": value for key, value in result.values.items()})
    if not client.measures:
        for name, values in client.system.items():
            run.summary.update({f"{name}.mean": fmean(values), f"{name}.max": max(values)})
    log = Path(run.settings.log_internal)
    run.finish(exit_code=0 if result.status in ("completed", "stopped") else 1)
    wandb.teardown()  # its service may still be writing; only its end says that all is on disk
    # Where the server refused the records (403), this returns all the same; only the log says it.
    if log.is_file() and b"fatal error" in log.read_bytes():
        raise ConnectionError(f"W&B did not accept all records, see {log}")
