"""Run scripts with a loop of their own on N ranks, in float64, and strike them."""

import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import end_with_first_failure, one_message
from tests.processes import Ranks, start_ranks
from tests.tiny import last_state

EXAMPLES = Path(__file__).parents[2] / "examples"
_outputs = itertools.count()


@dataclass(frozen=True)
class Strike:
    nth: int
    signum: int
    rank: int | None = 0


def start(
    script: Path, *arguments: str, world_size: int = 1, folder: Path, strike: Strike | None = None
) -> Ranks:
    output = folder / f"output-{next(_outputs)}"
    return start_ranks(_execute, world_size, output, script, list(arguments), folder, strike)


def run(
    script: Path, *arguments: str, world_size: int = 1, folder: Path, code: int = 0, **more
) -> Ranks:
    """Run a script to its end, which has this exit code on every rank."""
    ranks = start(script, *arguments, world_size=world_size, folder=folder, **more)
    assert ranks.wait() == [code] * world_size, ranks.output()
    return ranks


def run_here(script: Path, *arguments: str, folder: Path | None = None) -> int:
    """Run a script alone in this process, in its own folder or another; return its exit code."""
    import runpy

    import torch

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.chdir(folder or script.parent)
        patch.setattr(sys, "argv", [str(script), *arguments])
        torch.set_default_dtype(torch.float64)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
        finally:
            torch.set_default_dtype(torch.float32)
    return 0


def refused(script: Path, *arguments: str, world_size: int = 1, folder: Path) -> str:
    """Run a script that ends with one message and exit code 2; return the message."""
    ranks = start(script, *arguments, world_size=world_size, folder=folder)
    code = end_with_first_failure(ranks)
    return one_message(code, ranks.output())


def weights(run_folder: Path) -> dict[str, dict[str, object]]:
    """Return the state of a run's last checkpoint: what the script named."""
    return last_state(run_folder)["state"]


def _execute(script: Path, arguments: list[str], folder: Path, strike: Strike | None) -> None:
    import runpy

    import torch

    from samestep.core.loops.epochs import LoopEpochs
    from samestep.launch.ranks import process

    process.GRACE_S = 3.0  # no other Python starts late here
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sys.argv[:] = [str(script), *arguments]
    steps, count = itertools.count(1), LoopEpochs.count

    def counted(self, samples) -> None:
        count(self, samples)
        mine = strike is not None and strike.rank in (None, int(os.environ.get("RANK", "0")))
        if mine and next(steps) == strike.nth:
            os.kill(os.getpid(), strike.signum)

    LoopEpochs.count = counted
    runpy.run_path(str(script), run_name="__main__")
