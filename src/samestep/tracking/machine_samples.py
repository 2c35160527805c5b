"""What the machine of rank 0 does while it trains: sampled into the run directory, for trackers."""

import contextlib
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from samestep.run.files import Held, hold
from samestep.run.records import SYSTEM

_EVERY_S = 15.0
_FIRST_S = 1.0
_GPU = {
    "utilization_percent": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


class MachineSampler:
    """Append a sample to system.jsonl every few seconds, in one of the trackers' processes."""

    def __init__(self, pid: int) -> None:
        self._held: BinaryIO | None = None
        self._due = time.monotonic() + _FIRST_S
        self._taken = False
        psutil.cpu_percent()  # counts from here
        self._training: psutil.Process | None = None
        with contextlib.suppress(psutil.Error):
            self._training = psutil.Process(pid)
            self._training.cpu_percent()

    def sample(self, run: Path, step: int, *, last: bool = False) -> None:
        """Take a sample if one is due, or, at the end, if none was."""
        if self._taken if last else time.monotonic() < self._due:
            return
        if self._held is None:
            with contextlib.suppress(Held, OSError):
                self._held = hold((run / SYSTEM).with_suffix(".lock"))
        if self._held is None:
            return
        self._due, self._taken = time.monotonic() + _EVERY_S, True
        found = {**self._measure(), **_ask_gpus(gpus_of(run))}
        line = json.dumps({"event": "system", "time": time.time(), "step": step, **found})
        with contextlib.suppress(OSError), (run / SYSTEM).open("ab") as file:
            file.write(line.encode() + b"\n")

    def _measure(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        found: dict[str, Any] = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_percent": memory.percent,
            "memory_used_gib": (memory.total - memory.available) / 2**30,
        }
        with contextlib.suppress(psutil.Error):
            if self._training is not None:
                found["process_cpu_percent"] = self._training.cpu_percent()
                found["process_memory_gib"] = self._training.memory_info().rss / 2**30
        return found


def gpus_of(run: Path) -> Sequence[str] | None:
    """Return the UUIDs of the GPUs that a run computes on; None where it does not say.

    samestep's own runs say it; of a Trainer with nothing but samestep's logger it is not known.
    """
    with contextlib.suppress(OSError, ValueError):
        found: Sequence[str] | None = json.loads((run / "environment.json").read_text()).get("gpus")
        return found
    return ()  # it is not written yet


def _ask_gpus(wanted: Sequence[str] | None) -> dict[str, dict[str, float]]:
    """Measure the GPUs of a run, and no others of the machine."""
    if wanted is not None and not wanted:
        return {}
    query = ["nvidia-smi", f"--query-gpu=uuid,{','.join(_GPU.values())}"]
    query.append("--format=csv,noheader,nounits")
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no driver, or no answer
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return parse_gpus(done.stdout, wanted)
    return {}


def parse_gpus(printed: str, wanted: Sequence[str] | None) -> dict[str, dict[str, float]]:
    """Return the numbers of some GPUs from the lines of nvidia-smi, by their number on the machine.

    A line is `GPU-8d1f…, 37, 5120, 210.5, 61`, with `[N/A]` for some. UUIDs that are wanted have no
    `GPU-`, as PyTorch has them; None takes all.
    """
    found: dict[str, dict[str, float]] = {}
    for number, line in enumerate(printed.splitlines()):
        uuid, *texts = line.split(",")
        if wanted is None or uuid.strip().removeprefix("GPU-") in wanted:
            told = found[f"gpu{number}"] = {}
            for name, text in zip(_GPU, texts, strict=False):
                with contextlib.suppress(ValueError):
                    told[name] = float(text)
    return found
