"""Start one process, wait for it, and turn what it says into a measurement.

A measurement is a dictionary with `value` (samples per second, or seconds) and details.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Measurement = dict[str, Any]
Measure = Callable[[list[str], Path, dict[str, str]], Measurement]

TIMEOUT_S = 600
POLL_S = 0.002


class FailedError(Exception):
    """A process that ended badly, with the last line it wrote."""


def environment(scratch: Path, threads: int, *, gpu: bool = False) -> dict[str, str]:
    """Return what every process gets: the same threads, no GPU, one compile cache per benchmark."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "NO_COLOR": "1",
    }


def peer_throughput(command: list[str], _run: Path, env: dict[str, str]) -> Measurement:
    """Read the one JSON line that a peer prints among whatever its framework prints."""
    output, wall_s = _finish(command, env)
    lines = [line for line in output.splitlines() if line.startswith('{"samples_per_s"')]
    if not lines:
        raise FailedError(f"no JSON line from {command}")
    found = json.loads(lines[0])
    return {"value": found.pop("samples_per_s"), "wall_s": wall_s, **found}


def samestep_throughput(command: list[str], run: Path, env: dict[str, str]) -> Measurement:
    """Read the epochs of a samestep run; the first one warms up, as in every peer."""
    _, wall_s = _finish(command, env)
    events = list(_events(run))
    epochs = [event for event in events if event["event"] == "epoch"]
    if len(epochs) < 2:
        raise FailedError(f"{len(epochs)} epoch events in events.jsonl, 2 or more expected")
    seconds = [event["train_seconds"] for event in epochs]
    compiles = [event["seconds"] for event in events if event["event"] == "compile"]
    return {
        "value": epochs[-1]["samples"] / statistics.median(seconds[1:]),
        "wall_s": wall_s,
        "epochs": len(epochs) - 1,
        "samples": epochs[-1]["samples"],
        "threads": int(env["OMP_NUM_THREADS"]),
        "first_epoch_s": seconds[0],
        "epoch_s": seconds[1:],
        **({"compile_s": sum(compiles)} if compiles else {}),
    }


def fastest(measure: Measure) -> Measure:
    """Return a measure whose throughput is that of the fastest epoch, not of the median one."""

    def measured(command: list[str], run: Path, env: dict[str, str]) -> Measurement:
        found = measure(command, run, env)
        return found | {"value": found["samples"] / min(found["epoch_s"])}

    return measured


def seconds_to_accuracy(command: list[str], run: Path, env: dict[str, str]) -> Measurement:
    """Add up what a samestep run took from its first step to the evaluation on the test set.

    That is training and evaluations, the one on the test set included. Compiling is given apart,
    and so is the whole process; writing the checkpoint is in the latter alone.
    """
    _, wall_s = _finish(command, env)
    events = list(_events(run))
    evaluations = [event for event in events if event["event"] == "evaluation"]
    test = next((event for event in evaluations if event["split"] == "test"), None)
    if test is None:
        raise FailedError("no evaluation on the test set in events.jsonl")
    epochs = [event for event in events if event["event"] == "epoch"]
    training = sum(event["train_seconds"] for event in epochs)
    return {
        "value": training + sum(event["seconds"] for event in evaluations),
        "accuracy": test["accuracy"],
        "training_s": training,
        "compile_s": sum(event["seconds"] for event in events if event["event"] == "compile"),
        "epochs": len(epochs),
        "wall_s": wall_s,
    }


def profiled(command: list[str], _run: Path, env: dict[str, str]) -> Measurement:
    """Read what `samestep profile --json` says of a training."""
    output, wall_s = _finish(command, env)
    if "{" not in output:
        raise FailedError(f"no JSON from {command}")
    found = json.loads(output[output.index("{") :])
    measured, verdict = found["measured"], found["verdict"]
    return {
        "value": measured["wall"],
        "gpu_idle": measured["gpu_idle"],
        **{key: verdict[key] for key in ("kind", "share", "why", "change", "ceiling")},
        "phases": measured["ranks"][0]["phases"],
        "wall_s": wall_s,
    }


def equal(command: list[str], _run: Path, env: dict[str, str]) -> Measurement:
    """Read whether two trainings were equal to the last bit; one that differs has failed."""
    output, wall_s = _finish(command, env)
    found = json.loads(output.splitlines()[-1])
    if not found["equal"]:
        raise FailedError(f"not equal after {found['steps']} steps")
    return {"value": wall_s, **found}


def blocked_seconds(command: list[str], _run: Path, env: dict[str, str]) -> Measurement:
    """Read the one JSON line of `checkpoints.py --way`."""
    output, wall_s = _finish(command, env)
    found = json.loads(output.splitlines()[-1])
    return {"value": found["blocked_s"], "wall_s": wall_s, **found}


def seconds_to_line(command: list[str], _run: Path, env: dict[str, str]) -> Measurement:
    """Time from the start of the process until it prints that its first step is done."""
    start = time.perf_counter()
    with _started(command, env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("first step done"):
                return {"value": time.perf_counter() - start}
    raise FailedError(f"no first step from {command}")


def samestep_seconds_to_step(command: list[str], run: Path, env: dict[str, str]) -> Measurement:
    """Time from the start of the process until its first step is in the run's events."""
    start = time.perf_counter()
    with _started(command, env) as process:
        alive = True
        while alive:
            alive = process.poll() is None
            if any(event["event"] == "step" for event in _events(run)):
                return {"value": time.perf_counter() - start}
            time.sleep(POLL_S)
    raise FailedError(f"ended with code {process.returncode} before its first step")


def tracked_seconds_to_step(command: list[str], run: Path, env: dict[str, str]) -> Measurement:
    """As `samestep_seconds_to_step`; then wait for the end, also of what trackers have to do."""
    start = time.perf_counter()
    with _started(command, env) as process:
        while not any(event["event"] == "step" for event in _events(run)):
            if process.poll() is not None:
                raise FailedError(f"ended with code {process.returncode} before its first step")
            time.sleep(POLL_S)
        found = time.perf_counter() - start
        process.wait(TIMEOUT_S)
        return {"value": found}


def seconds_to_exit(command: list[str], _run: Path, env: dict[str, str]) -> Measurement:
    """Time a whole process."""
    return {"value": _finish(command, env)[1]}


def cpu_seconds(command: list[str], _run: Path, env: dict[str, str]) -> Measurement:
    """Count the CPU seconds of a process and of those that it has waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _finish(command, env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"value": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def imports_of(module: str, command: list[str]) -> bool:
    """Say whether a Python command, given without its interpreter, imports a module."""
    listing = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=False
    ).stderr
    names = (line.rpartition("|")[2].strip() for line in listing.splitlines())
    return any(name == module or name.startswith(f"{module}.") for name in names)


def _finish(command: list[str], env: dict[str, str]) -> tuple[str, float]:
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"not done after {TIMEOUT_S} s") from error
    except OSError as error:
        raise FailedError(str(error)) from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()
        raise FailedError(f"exit code {done.returncode}: {said[-1]}")
    return done.stdout, time.perf_counter() - start


@contextmanager
def _started(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and let it end by itself once its first step has been seen."""
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.communicate(timeout=TIMEOUT_S)


def _events(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a run's events, none if it has not begun."""
    path = run / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
