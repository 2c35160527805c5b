"""Ranks that hang, in real processes: the verdict names who, and the line."""

import os
import time
from contextlib import contextmanager, suppress

import pytest

from samestep.stall.judge import find_stall, judge
from samestep.stall.pulse import read_pulses
from samestep.stall.stacks import look
from tests.processes import TIMEOUT_S, start_ranks
from tests.stall import stuck

STALL_S = 0.7


@contextmanager
def hanging(folder, how):
    """Yield the verdict on two ranks that hang, and its seconds beyond the stall time."""
    folder.mkdir(parents=True)
    ranks = start_ranks(stuck.run, 2, folder / "output", folder, how)
    try:
        until = time.monotonic() + TIMEOUT_S / 4
        while True:
            assert time.monotonic() < until, ranks.output()
            pulses = read_pulses(folder)
            # The first steps of all: a process may start seconds after another.
            begun = len(pulses) == 2 and all(pulse.calls for pulse in pulses)
            if begun and (still := find_stall(pulses, STALL_S)):
                break
            time.sleep(0.02)
        begin = time.monotonic()
        verdict = judge(look(folder, pulses))
        yield verdict, still - STALL_S + time.monotonic() - begin
    finally:
        for process in ranks.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # with its workers
        ranks.wait()


# Rank 1 is the culprit.
CASES = [
    ("sleeps", "absent", [1], {0: "meet", 1: "sleeps"}),
    ("spins_in_c", "absent", [1], {0: "meet", 1: "spins_in_c"}),
    ("stopped", "stopped", [1], {0: "meet", 1: "stopped"}),
    ("left", "left", [1], {0: "meet", 1: "left"}),
    ("different", "different", [0, 1], {0: "alike", 1: "different"}),
    ("peers", "different", [0, 1], {0: "peers", 1: "peers"}),
    ("unseen", "absent", [1], {0: "unseen", 1: "late"}),
    ("waits_later", "absent", [1], {0: "waits_later", 1: "never_began"}),
    ("worker", "data", [1], {0: "fed", 1: "worker"}),
]


@pytest.mark.parametrize(("how", "cause", "culprits", "places"), CASES)
def test_a_stall_is_named_by_rank_and_line(tmp_path, how, cause, culprits, places):
    with hanging(tmp_path / "stall", how) as (verdict, late_s):
        assert verdict.cause == cause, verdict
        assert list(verdict.culprits) == culprits, verdict
        for rank, mark in places.items():
            assert verdict.places[rank] == stuck.line_of(mark), verdict
        if how == "waits_later":  # the call that it waits for is known
            assert "all_reduce #1 " in verdict.does[0]
        assert late_s < 60
