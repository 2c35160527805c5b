"""A Lightning logger that sends what a Trainer logs to trackers, as safely as `--track` does.

Rank 0 writes the metrics into a run directory, which a process for each tracker follows.
"""

import atexit
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning
import tomli_w
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from samestep.base.errors import UserError
from samestep.base.run.directory import Run, names_secret, new_run_path, versions
from samestep.base.run.files import write_text
from samestep.base.run.records import RUN_FORMAT, Record
from samestep.base.settings import Settings, as_table
from samestep.base.tracker_choice import check_choice, check_installed, chosen
from samestep.base.words import flatten
from samestep.show.tracking.processes import HYPERPARAMETERS, TrackerProcesses

_MOST = 250  # characters of a hyperparameter that is not a plain value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - what a user's own script shows


class TrackerLogger(Logger):
    """Log to Comet, MLflow, TensorBoard, Weights & Biases, or a tracker of your own.

        Trainer(logger=TrackerLogger("comet,tensorboard", name="spiral", project="spirals"))

    The training imports no tracker and waits for none. Metrics are kept in `events.jsonl` of the
    run directory, SAVE_DIR/NAME/VERSION, whatever a tracker does; `samestep track DIRECTORY --to
    TRACKER` sends what it does not have. Only rank 0 writes. Hyperparameters count that are logged
    before the first metrics, as the Trainer does.
    """

    def __init__(
        self,
        trackers: str | Iterable[str],
        *,
        save_dir: str | Path = "runs",
        name: str = "lightning",
        version: str | int | None = None,
        project: str | None = None,
        workspace: str | None = None,
        tags: Iterable[str] = (),
        offline: bool = False,
        timeout_s: float = 120.0,
        say: Callable[[str], None] = _say,
    ) -> None:
        """Check what is wanted; nothing is written or started yet.

        Args:
            trackers: names with commas between them, or a list; a file or a module of your own too.
            save_dir: where the run directories are, which all ranks' nodes need not share.
            name: of the run at the trackers, and of a folder in `save_dir`.
            version: the run directory in that folder; by default a new one. The same one given
                again continues its tracker runs.
            project: project (MLflow: experiment); by default the tracker's own variable, as
                WANDB_PROJECT, else the name.
            workspace: Comet's workspace, W&B's entity; by default the account's own.
            tags: of the run.
            offline: write the trackers' files into the run directory and send nothing.
            timeout_s: seconds that a tracker may take to start, and for each answer.
            say: called on rank 0 with each line to show; by default it goes to standard error.

        Raises:
            UserError: a tracker is unknown or not installed, or a name would be refused.
        """
        super().__init__()
        for what, part in (("name", name), ("version", "" if version is None else str(version))):
            if Path(part).is_absolute() or ".." in Path(part).parts:
                raise UserError(f"TrackerLogger: {what} {part!r} leads out of {save_dir}.")
        self._settings = _checked(
            track=trackers if isinstance(trackers, str) else ",".join(trackers),
            track_project=project,
            track_name=name,
            track_workspace=workspace,
            track_tags=(tags if isinstance(tags, str) else ",".join(tags)) or None,
            track_offline=offline,
            track_timeout=float(timeout_s),
        )
        self._save_dir, self._name, self._say = Path(save_dir), name, say
        self._version = new_run_path("tracked").name if version is None else str(version)
        self._hyperparameters: dict[str, Any] = {}
        self._run: Run | None = None
        self._trackers: TrackerProcesses | None = None
        self._begun = self._failed = self._warned = False
        self._step = self._ended_at = self._process = 0

    @property
    def name(self) -> str:
        """The run's name."""
        return self._name

    @property
    def version(self) -> str:
        """The run directory's name; on rank 0 the right one."""
        return self._version

    @property
    def save_dir(self) -> str:
        """Where the folders of run directories are."""
        return str(self._save_dir)

    @property
    def log_dir(self) -> str:
        """The run directory."""
        return str(self._save_dir / self._name / self._version)

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        """The run directory, which is created now; the Trainer asks before it begins."""
        return self._open().path

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Keep hyperparameters, flat, without those that are named like a secret."""
        table = vars(params) if isinstance(params, Namespace) else params
        self._hyperparameters |= {
            name: _plain(name, value)
            for name, value in flatten(table, by=".").items()
            if value is not None
        }
        if self._begun:
            self._write_settings()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metrics of a step; of no step given, the next one."""
        values = {name: float(value) for name, value in metrics.items()}
        epoch = values.pop("epoch", None)
        step = self._step + 1 if step is None else int(step)
        self._step = max(self._step, step)
        if not values:
            return
        self._begin()
        if step < self._ended_at:
            self._warn(
                f"this training is at step {step}, and an earlier one ended at step "
                f"{self._ended_at}. Trackers keep the first value of a step, so give each "
                "training its own TrackerLogger."
            )
        epoch = None if epoch is None else int(epoch)
        self._record("metrics", step=step, epoch=epoch, time=time.time(), values=values)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Record how a fit or a test ended."""
        if self._run is None:
            return
        self._begin()
        self._failed = status != "success"
        self._ended_at = self._step
        self._record("stop", step=self._step, reason=status)
        result = "failed" if self._failed else "completed"
        self._attempt(lambda run: run.write_result({"status": result, "steps": self._step}))

    @rank_zero_only
    def close(self) -> None:
        """Close the runs at the trackers; otherwise this is done when Python ends.

        It takes at most 30 seconds, and no time after a failure. Logging later opens them again.
        """
        run, trackers = self._run, self._trackers
        if run is None or trackers is None or os.getpid() != self._process:
            return
        self._run, self._begun = None, False
        atexit.unregister(self.close)
        try:
            trackers.close(failed=self._failed)
        finally:
            run.close()

    def _open(self) -> Run:
        """Open the run directory, and start the trackers' processes."""
        if self._run is None:
            self._run, self._process = Run(Path(self.log_dir)), os.getpid()
            self._trackers = TrackerProcesses(
                self._settings, self._name, self._show, stopped=lambda: False
            ).start()
            atexit.register(self.close)
        return self._run

    def _begin(self) -> None:
        """Write settings and start of the run for trackers, once; they begin with these there."""
        run = self._open()
        if self._begun:
            return
        self._begun = True
        self._write_settings()
        packages = {**versions(), "lightning": lightning.__version__}
        self._attempt(lambda run: run.write_environment({"versions": packages}))
        resumed = (run.path / "events.jsonl").stat().st_size > 0
        more = {"time": time.time(), "run_dir": str(run.path), "resumed": resumed}
        self._record("start", format=RUN_FORMAT, **more)

    def _write_settings(self) -> None:
        own = {k: v for k, v in as_table(self._settings).items() if k.startswith("track")}
        text = tomli_w.dumps({**own, HYPERPARAMETERS: self._hyperparameters})
        self._attempt(lambda run: write_text(run.path / "settings.toml", text))

    def _record(self, event: str, **values: Any) -> None:
        record = {"event": event, **values}
        self._attempt(lambda run: run.append(record))
        if self._trackers is not None:
            self._trackers.take(record)

    def _attempt(self, write: Callable[[Run], None]) -> None:
        """Write something; a full disk must not end the training."""
        try:
            write(self._open())
        except UserError as error:
            self._warn(str(error))

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"warning TrackerLogger: {text}")

    def _show(self, record: Record) -> None:
        """Show messages of trackers, as the screen of `samestep train` does."""
        if record["event"] == "tracker":
            mark = record["kind"] if record["kind"] in ("note", "warning") else record["tracker"]
            self._say(f"{mark:<7} {record['text']}")


def _checked(**settings: Any) -> Settings:
    """Return checked tracker settings; messages name them as the logger's arguments."""
    try:
        checked = Settings(**settings)
        check_choice(checked)
        check_installed(chosen(checked.track))  # on every rank: if only one refused, all would wait
    except UserError as error:
        raise UserError(re.sub("--track[- ]", "TrackerLogger: ", str(error))) from None
    return checked


def _plain(name: str, value: Any) -> str | int | float | bool:
    if isinstance(value, str) and names_secret(name):
        return "…"
    if isinstance(value, str | int | float):
        return value
    text = str(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
