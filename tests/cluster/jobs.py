"""Submit training to the sandbox as a user does, and look at what it left."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from samestep.base.run.records import read_records
from tests import tiny
from tests.cluster.sandbox import FINAL, WITHIN_S, RunningSandbox, wait_for
from tests.command_line import read_json
from tests.processes import start_ranks

# 120 samples, 30 steps an epoch; PACE is the seconds of a step, read anew for each.
RECIPE = """
import os, time
from pathlib import Path
import torch
from torch import nn
from samestep import Recipe, Splits
PACE = Path("pace").absolute()  # the job's code is a copy, and its working directory is not
def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(140, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:120], y[:120]), validation=(x[120:], y[120:]))
def model():
    return nn.Linear(4, 2)
def loss(outputs, targets):
    if PACE.exists() and outputs.requires_grad:
        time.sleep(float(PACE.read_text()))  # a model as slow to train as the test wants it
    return nn.functional.cross_entropy(outputs, targets)
recipe = Recipe(model=model, data=data, loss=loss,
                settings={"epochs": 2, "batch_size": 4, "log_every": 1, "seed": 3})
"""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    sandbox: RunningSandbox
    job: str
    run: Path

    @property
    def log(self) -> str:
        path = self.run / f"slurm-{self.job}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, state: str, within_s: float = WITHIN_S) -> None:
        try:
            self.sandbox.wait_for_state(self.job, state, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from error

    def wait_for_step(self, step: int, within_s: float = WITHIN_S) -> None:
        def is_there() -> bool:
            assert self.sandbox.state(self.job) not in FINAL, self.log
            return any(r["event"] == "step" and r["step"] >= step for r in self.records())

        wait_for(is_there, within_s=within_s)

    def records(self) -> list[dict[str, Any]]:
        """Return the run's records as those of one uninterrupted run."""
        return list(read_records(self.run)) if (self.run / "events.jsonl").exists() else []

    def losses(self) -> list[tuple[int, float]]:
        return [(r["step"], r["loss"]) for r in self.records() if r["event"] == "step"]

    def all_records(self) -> list[dict[str, Any]]:
        return tiny.all_records(self.run)

    def result(self) -> dict[str, Any]:
        return read_json(self.run / "result.json")

    def processes(self, numbered_by: str = "SLURM_PROCID") -> dict[int, int]:
        """Return number → id of the job's processes that a variable numbers, but for srun's."""
        found: dict[int, int] = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                variables = process.environ()
                mine = variables.get("SLURM_JOB_ID") == self.job and numbered_by in variables
                if mine and process.name() != "srun" and "train" in process.cmdline():
                    found.setdefault(int(variables[numbered_by]), process.pid)
        return found


def write_recipe(folder: Path) -> Path:
    return tiny.write_recipe(folder, RECIPE)


def set_pace(folder: Path, seconds: float | None) -> None:
    path = folder / "pace"
    if seconds is None:
        path.unlink(missing_ok=True)
    else:
        path.with_suffix(".new").write_text(str(seconds))
        path.with_suffix(".new").rename(path)


def samestep(
    sandbox: RunningSandbox, folder: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    """Run samestep's command line in a folder, with the sandbox as its cluster."""
    outputs = folder.with_name(f"{folder.name}-outputs-{next(_calls)}")
    ranks = start_ranks(_command_line, 1, outputs, words, folder, outputs, sandbox.environment)
    (code,) = ranks.wait()
    told = (outputs / "errors.txt").read_text()
    return subprocess.CompletedProcess(words, code, ranks.printed(0), told)


_calls = itertools.count()


def _command_line(words: Sequence[str], folder: Path, outputs: Path, shell: dict[str, str]) -> None:
    from samestep.shell.cli import main

    os.dup2(os.open(outputs / "errors.txt", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    os.environ.clear()
    os.environ.update(shell)
    os.chdir(folder)
    sys.exit(main(list(words)))


def submit(sandbox: RunningSandbox, folder: Path, *words: str) -> Submitted:
    done = samestep(sandbox, folder, "slurm", "submit", *words)
    assert done.returncode == 0, done.stderr
    job, run = re.findall(r"^(?:job|run) +(\S.*)$", done.stdout, re.MULTILINE)
    return Submitted(sandbox=sandbox, job=job, run=folder / run)
