"""For all tests: Ctrl-C is heeded, and in CI (SAMESTEP_NO_SKIP) a skipped test is a failure.

Tests marked `gpu` are the exception: they may be skipped in CI too.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import call, one_message


def pytest_configure():
    """Heed Ctrl-C, and let what is started here heed it, also where a shell began us with `&`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def refused(capfd) -> Callable[..., str]:
    """Run a command in this process that has to be refused; return its one message.

    `tests.command_line.refusal` does the same with real processes: for several ranks, and where
    what lies between `main()` and the exit code of a process is what is tested.
    """

    def run(*arguments: str) -> str:
        capfd.readouterr()
        code = call(*arguments)
        printed, told = capfd.readouterr()
        return one_message(code, printed + told)

    return run


def _whole_run(folder: Path, world_size: int) -> Path:
    from tests.tiny import train, write_recipe

    path = folder / "run"
    recipe = write_recipe(folder)
    train(recipe, "--run-dir", str(path), world_size=world_size, folder=folder)
    return path


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Path:
    """The tiny recipe trained to its end on one rank; only to be looked at."""
    return _whole_run(tmp_path_factory.mktemp("uninterrupted"), 1)


@pytest.fixture(scope="session")
def uninterrupted_on_two(tmp_path_factory) -> Path:
    """The same on two ranks."""
    return _whole_run(tmp_path_factory.mktemp("uninterrupted-on-two"), 2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    must_run = os.environ.get("SAMESTEP_NO_SKIP") and item.get_closest_marker("gpu") is None
    if report.skipped and must_run and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped where nothing may be: {report.longrepr}"
    return report
