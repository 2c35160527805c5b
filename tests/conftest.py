"""For all tests: Ctrl-C is heeded, folders of tests lie in memory, and no example has a deadline.

In CI (SAMESTEP_NO_SKIP) a skipped test is a failure.

Tests marked `gpu` are the exception: they may be skipped in CI too.
"""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# As samestep's command line does before it imports torch: threads that spin take the cores from the
# other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil
import pytest

from tests.command_line import call, one_message
from tests.slurm.fake_slurm import FakeSlurm, install

pytest_plugins = ["tests.costs"]
MEMORY, NEEDS = Path("/dev/shm"), 6 << 30
LONGEST = {
    *("test_lint.py", "test_docs.py", "test_walkthrough.py", "test_first_steps.py"),
    *("test_gpu_bench.py", "test_gpu_kit.py", "test_by_task.py"),
}


def pytest_configure():
    """Heed Ctrl-C, and let what is started here heed it, also where a shell began us with `&`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _is_memory_for_files():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    with contextlib.suppress(ImportError):  # tests/gpu runs where it is not installed
        from hypothesis import HealthCheck, settings

        # An example takes longer than a fifth of a second wherever other processes have the cores.
        unhurried = [HealthCheck.too_slow]
        settings.register_profile("samestep", deadline=None, suppress_health_check=unhurried)
        settings.load_profile("samestep")


def pytest_collection_modifyitems(items):
    """Begin with the longest, lest one of them is what all wait for; Slurm's jobs wait as it is."""
    items.sort(key=lambda item: (item.path.parent.name != "cluster", item.path.name not in LONGEST))


def pytest_collection_finish():
    """Let no test's full collection look at the million objects that stay to the end."""
    gc.collect()
    gc.freeze()


def _is_memory_for_files() -> bool:
    """Whether tests can write into memory: a short training waits longer for a disk's `fsync`."""
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return False
    can_execute = not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    free = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available)
    return can_execute and free >= NEEDS


@pytest.fixture(autouse=True)
def _state_of_one_test(tmp_path_factory) -> Iterator[None]:
    """Forget the recipes that a test has read: the next one has files of the same names.

    A training that failed within this process is watched no longer: its watcher would kill it.
    """
    yield
    if watched := sys.modules.get("samestep.launch.ranks.watched"):
        watched.end()
    folder = f"{tmp_path_factory.getbasetemp().parent}{os.sep}"
    for name, module in sys.modules.copy().items():
        # Not by getattr: a lazy module would import what it stands for. Not by Path: there are
        # 2,300 modules, and this runs after each test.
        file = getattr(module, "__dict__", {}).get("__file__")
        if file and file.startswith(folder):
            del sys.modules[name]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    """Put a Slurm on the PATH, played by scripts, that knows the jobs which a test adds."""
    fake = install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    return fake


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


@pytest.fixture
def output_of(capfd) -> Callable[..., str]:
    """Run a command in this process, to its good end or to a code; return what it printed."""

    def run(*arguments: object, code: int = 0) -> str:
        capfd.readouterr()
        assert call(*map(str, arguments)) == code
        return capfd.readouterr().out

    return run


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A folder on the disk, not below /dev: what is written there is nobody's doing."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Path:
    """The tiny recipe trained to its end on one rank; only to be looked at."""
    from tests.tiny import trained, write_recipe

    folder = tmp_path_factory.mktemp("uninterrupted")
    trained(write_recipe(folder), folder / "run")
    return folder / "run"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    must_run = os.environ.get("SAMESTEP_NO_SKIP") and item.get_closest_marker("gpu") is None
    if report.skipped and must_run and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped where nothing may be: {report.longrepr}"
    return report
