"""What each test costs: the CPU seconds of its process, of those it started, and of its ranks."""

import os
from collections import defaultdict
from multiprocessing import forkserver
from pathlib import Path

import pytest

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser):
    parser.addoption("--heaviest", type=int, default=10, metavar="N", help="of the tests to print")


def pytest_configure(config):
    # The stash of the controller, which hears of all workers' tests.
    config.pluginmanager.register(_Costs(config.getoption("heaviest")))


def cpu_seconds() -> float:
    """Return what this process, its ended children, and the fork server's ended ranks took."""
    seconds = sum(os.times()[:4])
    server = forkserver._forkserver._forkserver_pid
    if server is not None:
        words = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        seconds += sum(map(int, words[11:15])) / _TICKS_PER_S  # its own, and its children's
    return seconds


class _Costs:  # notes what each phase of a test takes, and prints the sum of the heaviest
    def __init__(self, num_shown: int) -> None:
        self.num_shown = num_shown
        self.before = cpu_seconds()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self.before = now - self.before, now  # xdist sends it along
        return report

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += getattr(report, "cpu_seconds", 0.0)  # a worker may crash

    def pytest_terminal_summary(self, terminalreporter):
        heaviest = sorted(self.seconds.items(), key=lambda cost: -cost[1])[: self.num_shown]
        if not heaviest:
            return
        total, shown = sum(self.seconds.values()), sum(seconds for _, seconds in heaviest)
        terminalreporter.section("CPU seconds")
        terminalreporter.line(
            f"{total:.0f} in {len(self.seconds)} tests, {shown:.0f} of them in these:"
        )
        for name, seconds in heaviest:
            terminalreporter.line(f"{seconds:7.1f}  {name}")
