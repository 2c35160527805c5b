"""Run the command line on ranks as a launcher does, and look at what it said and left."""

import contextlib
import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.processes import TIMEOUT_S, Ranks, start_ranks

AGENT_LOOKS_EVERY_S = 0.3

# Trains in hundredths of a second; its loss can be told to go wrong.
RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits
def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(90, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:60], y[:60]), validation=(x[60:75], y[60:75]), test=(x[75:], y[75:]))
def model():
    return nn.Linear(4, 2)
recipe = Recipe(model=model, data=data, settings={"epochs": 2, "batch_size": 10})
"""


def start(
    *arguments: str, world_size: int = 1, folder: Path, environment: dict[str, str] | None = None
) -> Ranks:
    """Start the command line on N ranks, with more variables in their environment."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"output-{len(list(folder.iterdir()))}"
    return start_ranks(_command_line, world_size, place, list(arguments), environment or {})


def run(
    *arguments: str, world_size: int = 1, folder: Path, environment: dict[str, str] | None = None
) -> Ranks:
    ranks = start(*arguments, world_size=world_size, folder=folder, environment=environment)
    assert ranks.wait() == [0] * world_size, ranks.output()
    return ranks


def typed(
    *words: str | Path, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, to whatever end: a path, or a module's `-m NAME`."""
    program = [sys.executable, *words] if str(words[0]).startswith("-") else words
    return subprocess.run(
        program,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def end_with_first_failure(ranks: Ranks) -> int:
    """Stop all ranks once one has failed, as torchrun does; return the failed rank's exit code."""
    while True:
        codes = [process.exitcode for process in ranks.processes]
        failed = [code for code in codes if code]
        running = [
            p.sentinel for p, code in zip(ranks.processes, codes, strict=True) if code is None
        ]
        if failed or not running:
            break
        assert wait(running, TIMEOUT_S), ranks.output()
    if len(ranks.processes) > 1:
        time.sleep(AGENT_LOOKS_EVERY_S)  # what a rank prints until torchrun's agent looks is seen
    for process in ranks.processes:
        process.terminate()
    ranks.wait()
    return failed[0] if failed else 0


def refusal(
    *arguments: str, world_size: int = 1, folder: Path, environment: dict[str, str] | None = None
) -> str:
    """Run a command that has to be refused; return the one message, its white space made single.

    It is one message, not a traceback, shown by one rank; the exit code is 2.
    """
    ranks = start(*arguments, world_size=world_size, folder=folder, environment=environment)
    code = end_with_first_failure(ranks)
    message = one_message(code, ranks.output())
    assert ranks.printed(0).strip(), "rank 0 is the one that speaks"
    return message


def one_message(code: int, printed: str) -> str:
    """Check that a command was refused with one message; return it, its white space made single."""
    assert code == 2, printed
    assert "Traceback" not in printed
    messages = re.findall(r"^samestep: ", printed, re.MULTILINE)
    assert len(messages) == 1, printed
    return " ".join(printed.split())


def call(*arguments: str) -> int:
    """Run the command line in this very process, alone; return its exit code.

    It takes a third of the time of a forked rank. What the command changes in its process is put
    back; for a training there is `train_here`.
    """
    from samestep.shell.cli import main

    with _process_as_it_was():
        try:
            return main(list(arguments))
        except SystemExit as ended:
            return int(ended.code or 0)


def train_here(*arguments: str) -> str:
    """Train alone in this process, by the command line; return what it printed."""
    from samestep.shell.api.call import as_in_fresh_process

    with as_in_fresh_process(), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert call("train", *arguments) == 0, printed.getvalue()
    return printed.getvalue()


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    variables, path, modules = dict(os.environ), sys.path[:], set(sys.modules)
    thresholds, handler = gc.get_threshold(), signal.getsignal(signal.SIGUSR1)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        for name in set(sys.modules) - modules:  # the recipe and what it imports from beside it
            file = getattr(sys.modules[name], "__file__", None)
            if file and str(Path(file).resolve().parent) in set(sys.path) - set(path):
                del sys.modules[name]
        sys.path[:] = path
        gc.set_threshold(*thresholds)
        signal.signal(signal.SIGUSR1, handler)


def files_written(arguments: list[str]) -> set[Path]:
    """Run the command line on the rank that calls; return what it opened for writing, or renamed.

    What Python keeps of a compiled module is written by whichever rank imports it first.
    """
    from samestep.shell.cli import main

    written: set[Path] = set()

    def note(event: str, details: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(details[2], int) and details[2] & _WRITES
        if (writes or event == "os.rename") and isinstance(details[0], str | Path):
            written.add(Path(details[0]).absolute())

    sys.addaudithook(note)
    assert main(arguments) == 0
    return {path for path in written if "__pycache__" not in path.parts}


_WRITES = os.O_WRONLY | os.O_RDWR


def tree(folder: Path) -> set[Path]:
    """Return everything below a folder, but for what Python keeps of compiled modules."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def read_json(path: Path) -> Any:
    """Return a JSON file's value; NaN and infinity, which JSON does not have, are refused."""
    return json.loads(path.read_text(), parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _command_line(arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    from samestep.shell.cli import main

    sys.argv = ["samestep", *arguments]
    sys.exit(main(arguments))
