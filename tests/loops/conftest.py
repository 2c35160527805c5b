"""For scripts with a loop of their own that run in pytest's own process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.command_line import one_message
from tests.loops.scripts import run_here


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture
def refused_here(capfd) -> Callable[[Path], str]:
    """Run a script that is refused in this process; return its one message."""

    def call(path: Path) -> str:
        capfd.readouterr()
        code = run_here(path)
        return one_message(code, "".join(capfd.readouterr()))

    return call
