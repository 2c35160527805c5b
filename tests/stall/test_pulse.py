"""A rank's pulse says what it does, to whoever reads the file, and costs next to nothing."""

import os
import time
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed as dist

from samestep.stall.collectives import watch_collectives
from samestep.stall.judge import find_stall, judge
from samestep.stall.pulse import WORLD, Pulse, read_pulse, read_pulses
from samestep.stall.stacks import look
from tests.processes import TIMEOUT_S, run_ranks, start_ranks
from tests.stall import stuck


@pytest.fixture
def pulse(tmp_path):
    opened = Pulse(tmp_path, 3)
    yield opened
    opened.close()


def test_a_pulse_says_the_steps_the_calls_and_the_end(pulse, tmp_path):
    for number in range(1, 101):
        pulse.step(number)
        with pulse.inside("all_reduce", "float32[2]", "train.py:7", WORLD):
            pass
    (read,) = read_pulses(tmp_path)
    assert (read.rank, read.pid, read.steps, read.code) == (3, os.getpid(), 100, None)
    assert len(read.step_times) == 63
    assert min(read.step_times) > 0
    assert [visit.seq for visit in read.calls] == [*range(37, 101)]
    assert {visit[:3] for visit in read.calls} == {("all_reduce", "float32[2]", "train.py:7")}
    assert {visit.state for visit in read.calls} == {"left"}
    assert time.monotonic() - read.moved < 60
    pulse.ended(3)
    assert read_pulse(tmp_path / "pulse-rank-3").code == 3


def test_the_innermost_call_is_told_and_the_outer_one_again_after_it(pulse, tmp_path):
    def now():
        return read_pulse(tmp_path / "pulse-rank-3").now

    with pulse.inside("backward", group="backward"):
        for _ in range(70):  # more than are kept
            with pulse.inside("all_gather", group=WORLD):
                assert now().kind == "all_gather"
            assert now().kind == "backward"
    assert now() is None
    with pytest.raises(ValueError, match="no"), pulse.inside("barrier", group=WORLD):
        raise ValueError("no")
    assert read_pulse(tmp_path / "pulse-rank-3").calls[-1].state == "raised"


def test_a_long_path_keeps_its_line_number_and_what_is_no_pulse_yet_is_none(pulse, tmp_path):
    with pulse.inside("barrier", "x" * 999, "/é" * 300 + ".py:123", WORLD):
        assert read_pulse(tmp_path / "pulse-rank-3").now.where.endswith(".py:123")
        assert read_pulse(tmp_path / "pulse-rank-3").now.group == WORLD
    assert read_pulse(tmp_path / "pulse-rank-0") is None
    (tmp_path / "pulse-rank-0").write_bytes(bytes(100_000))
    assert read_pulse(tmp_path / "pulse-rank-0") is None


def call_everything(folder):
    noted = []
    rank = int(os.environ["RANK"])
    pulse = Pulse(folder, rank)
    all_reduce = dist.all_reduce
    with watch_collectives(pulse, lambda *call: noted.append((*call, pulse.now))):
        dist.init_process_group("gloo")
        x = torch.ones(2, 3)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.all_gather_object([None, None], {"a": 1})  # which calls other collectives
        alone = dist.new_group([0])
        dist.broadcast(x, 0, alone)
        dist.broadcast(x, src=1, async_op=True).wait()
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        x.requires_grad_().sum().backward()
        dist.destroy_process_group()
    assert dist.all_reduce is all_reduce
    (own,) = (read for read in read_pulses(folder) if read.rank == rank)
    shapes = [
        (kind, [tuple(tensor.shape) for tensor in tensors], group, now.seq, now.detail)
        for kind, tensors, _where, group, now in noted
    ]
    return shapes, [visit.kind for visit in own.calls], {visit.where for visit in own.calls}


def test_each_collective_is_noted_once_with_what_must_be_alike(tmp_path):
    (zero, kinds, places), (one, _, _) = run_ranks(call_everything, 2, tmp_path, tmp_path)
    shared = [
        ("all_reduce", [(2, 3)], WORLD, 1, "float32[2, 3] op=MAX"),
        ("all_gather_object", [], WORLD, 2, ""),
        ("broadcast", [(2, 3)], WORLD, 3, "float32[2, 3] src=1"),
        ("barrier", [], WORLD, 4, ""),
    ]
    assert one == shared
    # The group of one is rank 0's alone.
    ((kind, _, group, seq, _),) = [call for call in zero if call not in shared]
    assert (kind, group.rpartition(":")[2], seq) == ("broadcast", "0", 1)
    assert kinds == [
        *("init_process_group", "all_reduce", "all_gather_object", "new_group", "broadcast"),
        *("broadcast", "barrier", "send", "backward", "destroy_process_group"),
    ]
    assert all(place.startswith(f"{__file__}:") for place in places)


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
