"""Start the examples as their reader does, or without his seconds of imports; read their output."""

import contextlib
import io
import itertools
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.command_line import end_with_first_failure, typed
from tests.processes import start_ranks

ROOT = Path(__file__).parent.parent.parent
TRAIN_DISTRIBUTED = str(ROOT / "examples" / "mnist_torchrun" / "train_distributed.py")
MNIST_PROFILING = ROOT / "examples" / "mnist_profiling"
SPIRAL_LIGHTNING = str(ROOT / "examples" / "spiral_lightning" / "train.py")
JOB_SCRIPTS = sorted([*ROOT.glob("examples/*/*.slurm"), *ROOT.glob("examples/*/*.sbatch")])

EPOCH = re.compile(
    r"^Epoch (\d+) - Avg Loss: (\d+\.\d+), Accuracy: (\d+\.\d\d)%\n"
    r"  held out - Avg Loss: (\d+\.\d+), Accuracy: (\d+\.\d\d)%$",
    re.MULTILINE,
)


def python(world_size: int = 1) -> list[str]:
    """Return what runs a script on this many ranks, the script's name to follow."""
    if world_size == 1:
        return [sys.executable]
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world_size}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"),
    ]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user who sets the number of threads, lest torchrun warns."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


_runs = itertools.count()


def forked(
    script: str, *arguments: str, folder: Path, world_size: int = 1, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, to whatever end, on ranks that have imported torch already."""
    outputs = folder.parent / f"{folder.name}-outputs-{next(_runs)}"
    command = [script, *arguments]
    ranks = start_ranks(_script, world_size, outputs, command, folder, outputs, more)
    code = end_with_first_failure(ranks)
    told = "".join((outputs / f"errors-{rank}.txt").read_text() for rank in range(world_size))
    printed = "".join(ranks.printed(rank) for rank in range(world_size))
    return subprocess.CompletedProcess(command, code, printed, told)


def _script(command: list[str], folder: Path, outputs: Path, variables: dict[str, str]) -> None:
    import torch

    errors = outputs / f"errors-{os.environ.get('RANK', '0')}.txt"
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    os.environ.update(variables)
    if "RANK" in os.environ:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv[:] = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    runpy.run_path(command[0], run_name="__main__")


def run(
    *command: str, folder: Path, world_size: int = 1, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as a reader types it, under torchrun for several ranks, to whatever end."""
    return typed(*python(world_size), *command, folder=folder, **{"OMP_NUM_THREADS": "1", **more})


def kill_at(line: str, *command: str, folder: Path, **more: str) -> None:
    """Run a script until it prints a line that begins so, and kill it."""
    words, to = [*python(), *command], {"env": environment(**more), "stdout": subprocess.PIPE}
    with subprocess.Popen(words, cwd=folder, text=True, **to) as process:
        while not process.stdout.readline().startswith(line):
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL


@contextlib.contextmanager
def _beside(script: str) -> Iterator[None]:
    """Let a script import its neighbours, and forget them: other examples have the same names."""
    folder, before = Path(script).parent, set(sys.modules)
    with mock.patch.object(sys, "path", [str(folder), *sys.path]):
        yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
            del sys.modules[name]


def defined(script: str) -> dict[str, Any]:
    with _beside(script):
        return runpy.run_path(script)


def refusal(script: str, *arguments: str, folder: Path, **more: str) -> str:
    """Run a script in this process, where it must end with exit code 2; return its one message."""
    told, code = io.StringIO(), 0
    with (
        _beside(script),
        mock.patch.dict(os.environ, more),
        mock.patch.object(sys, "argv", [script, *arguments]),
        contextlib.chdir(folder),
        contextlib.redirect_stderr(told),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    messages = re.findall(rf"^{re.escape(Path(script).name)}: .*", told.getvalue(), re.MULTILINE)
    assert (code, len(messages)) == (2, 1), told.getvalue()
    return messages[0]


def epochs(printed: str) -> list[tuple[float, ...]]:
    """Return each epoch's number, loss and accuracy, and those of the held-out images."""
    return [tuple(float(number) for number in found) for found in EPOCH.findall(printed)]
