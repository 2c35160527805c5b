"""Comet: `--track comet`."""

import io
import re
from collections.abc import Sequence
from typing import Any

import comet_ml

from samestep.base.errors import UserError
from samestep.show.tracking import Server, Started, TrackedRecord, TrackedResult, TrackedRun

COUNTS_AT_END = True  # offline, what was written counts once it is packed

# Comet would describe this process, not the training, and keep its source.
_NOT = (
    *("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch"),
    *("log_env_details", "auto_output_logging", "auto_param_logging", "auto_metric_logging"),
    "auto_log_co2",
)


def find_server() -> Server:
    """Return Comet's server and key, from wherever Comet has them."""
    config = comet_ml.get_config()
    if config["comet.start.online"] is False:
        raise UserError("COMET_START_ONLINE is off")
    key = comet_ml.config.get_api_key(None, config)
    if not key:
        raise UserError("COMET_API_KEY is not set, and `comet login` has stored no key")
    # The client would only learn it from the server. What follows the * is the server's address.
    if not re.fullmatch(r"[A-Za-z0-9_-]{20,}(\*\S+)?", key):
        raise UserError("COMET_API_KEY is malformed: Comet's keys are 25 letters and digits")
    address = comet_ml.config.get_backend_address()
    return Server(address=address, secrets=(key, key.partition("*")[0]))


def start(run: TrackedRun) -> Started:
    """Open the experiment: its key is our id, so that it is the same whenever the run continues."""
    config = comet_ml.ExperimentConfig(
        offline_directory=str(run.folder),
        name=run.name,
        tags=list(run.tags),
        display_summary_level=0,
        **dict.fromkeys(_NOT, False),
    )
    client = comet_ml.start(
        online=not run.offline,
        experiment_key=run.id,
        workspace=run.workspace,
        project_name=run.project,
        mode="get_or_create",
        experiment_config=config,
    )
    if not client.alive:
        raise ConnectionError("Comet did not accept the experiment")
    client.log_parameters(dict(run.settings))
    client.log_others({f"facts.{key}": value for key, value in run.facts.items()})
    return Started(client=client, run=run.id, link=None if run.offline else client.url)


def record(client: Any, entries: Sequence[TrackedRecord]) -> None:
    """Log the metrics by step and epoch, and wait until they have arrived."""
    for entry in entries:
        if entry.file is not None and entry.file.is_file():
            client.log_model("checkpoint", str(entry.file), overwrite=True)
        elif entry.picture is not None:
            if content := entry.picture.png():
                name = f"{entry.picture.name}.png"
                client.log_image(io.BytesIO(content), name=name, step=entry.step)
        elif entry.values:
            client.log_metrics(dict(entry.values), step=entry.step, epoch=entry.epoch)
    if not isinstance(client, comet_ml.OfflineExperiment) and not client.flush():
        raise ConnectionError("Comet did not accept all records")


def finish(client: Any, result: TrackedResult) -> None:
    """Log the result, and pack the files or wait until all has arrived."""
    client.log_others({f"result.{key}": value for key, value in result.values.items()})
    client.log_other("result.status", result.status)
    client.end()
