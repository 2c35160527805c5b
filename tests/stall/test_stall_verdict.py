"""The verdict on ranks as they were seen, and as ranks of several nodes tell of themselves."""

import dataclasses
import os
import time
from contextlib import contextmanager, suppress

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given

from samestep.core.loops import gradients
from samestep.launch.ranks import world
from samestep.launch.stall import pulse as pulses
from samestep.launch.stall.collectives import watch_collectives
from samestep.launch.stall.stacks import RankStand, StackFrame, Stand, _stack_of, inspect_ranks
from samestep.launch.stall.stall_report import (
    TEXT,
    StandReport,
    read_reports,
    verdict_on,
    write_report,
)
from samestep.launch.stall.stall_verdict import find_culprit, find_stall, mismatch, patience
from tests.processes import TIMEOUT_S, run_ranks, start_ranks
from tests.stall import stuck

SCRIPT = """
for epoch in range(2):
    for batch in range(9):
        loss.backward()
        for tensor in tensors: all_reduce(tensor)
        slow()
    barrier()
save()
"""


@pytest.fixture
def at(tmp_path):  # return what gives the FILE:LINE of a word of the script
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    lines = SCRIPT.splitlines()
    return lambda word: f"{path}:{lines.index(next(x for x in lines if word in x)) + 1}"


def seen(rank, place, *calls, doing="sleeps", **more):
    """Return a rank that stands at a place, after these calls; it is in the last, if that is so."""
    file, _, line = place.rpartition(":")
    frames = (StackFrame(file, int(line), "main"),) if place else ()
    now = calls[-1] if calls and calls[-1].state == "inside" else None
    pulse = pulses.RankPulse(rank=rank, calls=calls, now=now, **more)
    return RankStand(pid=1, doing=doing, frames=frames, pulse=pulse)


def call(kind, seq, where="", group=pulses.WORLD, detail="", state="left"):
    return pulses.Visit(kind, detail, where, group, seq, float(seq), state)


def inside(*args, **more):
    return call(*args, state="inside", **more)


def test_what_moves_is_no_stall_and_what_is_stopped_is_told(at):
    of_ranks = [pulses.RankPulse(rank=0, moved=10.0), pulses.RankPulse(rank=1, moved=40.0, code=0)]
    assert find_stall(of_ranks, 30.0, now=69.0) is None
    assert find_stall(of_ranks, 30.0, now=71.0) == 31.0
    assert find_stall([of_ranks[1]], 30.0, now=1e9) is None
    assert find_stall([], 30.0, now=1e9) is None
    dump = (
        "Current thread 0x00007f0000000001 (most recent call first):\n"
        '  File "/a.py", line 1 in other\n\n'
        "Thread 0x00007f0000000002 (most recent call first):\n"
        '  File "/caf\\xe9/\\u4e2d1.py", line 12 in main\n'
    )
    assert _stack_of(0x7F0000000002, dump) == (StackFrame("/café/中1.py", 12, "main"),)
    loader = StackFrame("/x/site-packages/torch/utils/data/dataloader.py", 9, "_get_data")
    waits = seen(1, at("batch"))
    waits = dataclasses.replace(
        waits, frames=(loader, *waits.frames), workers=(Stand(pid=77, doing="stopped"),)
    )
    first = seen(0, at("all_reduce"), inside("all_reduce", 1, at("all_reduce")))
    verdict = find_culprit([first, waits])
    assert (verdict.cause, verdict.culprits) == ("data", (1,))
    assert "77" in verdict.does[1]
    assert verdict.places[1] == at("batch")
    same = inside("all_reduce", 4, at("all_reduce"))
    verdict = find_culprit([seen(rank, "", same, doing="stopped") for rank in (0, 1)])
    assert (verdict.cause, verdict.culprits) == ("stopped", (0, 1))
    assert verdict.places == dict.fromkeys((0, 1), at("all_reduce"))


@given(st.lists(st.floats(0, 1e3), max_size=9), st.floats(0, 1e3))
def test_patience_is_twenty_steps_but_never_less_than_asked_for(times, least):
    assert patience(times, least) >= least
    assert patience([2.0, 2.0, 90.0], least) == max(40.0, least)
    assert patience([], least) == least


def test_of_three_ranks_the_missing_or_the_one_that_computes_is_named(at):
    pair = "pair:1,2"
    verdict = find_culprit([
        seen(0, at("all_reduce"), inside("all_reduce", 4, at("all_reduce"))),
        seen(1, at("barrier"), inside("barrier", 7, at("barrier"), group=pair)),
        seen(2, at("slow"), call("barrier", 6, at("barrier"), group=pair)),
    ])  # fmt: skip
    assert (verdict.cause, verdict.culprits) == ("absent", (2,))
    assert verdict.places[2] == at("slow")
    verdict = find_culprit([
        seen(0, at("barrier"), inside("barrier", 1, at("barrier"), group="pair:0,1")),
        seen(1, at("slow")),
        seen(2, at("save")),
    ])  # fmt: skip
    assert verdict.culprits == (1,)
    backward = inside("backward", 2, at("backward"), group="backward")
    verdict = find_culprit([seen(0, at("backward"), backward), seen(1, at("slow"), backward)])
    assert (verdict.culprits, verdict.places[1]) == ((1,), at("slow"))
    waits, spins = seen(0, at("backward"), backward), seen(1, at("backward"), backward)
    assert find_culprit([waits, spins]).cause == "unknown"
    verdict = find_culprit([waits, dataclasses.replace(spins, doing="computes")])
    assert verdict.culprits == (1,)


def test_a_rank_that_calls_something_else_is_named_with_node_line_and_step(at):
    same = inside("all_reduce", 4, at("all_reduce"))
    other = inside("broadcast", 4, at("slow"))
    verdict = find_culprit([
        seen(0, at("slow"), other),
        *(seen(rank, at("all_reduce"), same) for rank in (1, 2)),
    ])  # fmt: skip
    assert (verdict.cause, verdict.culprits) == ("different", (0,))

    def backward(seq, word, state="left"):
        return call("backward", seq, at(word), group="backward", state=state)

    verdict = find_culprit([
        seen(0, at("backward"), backward(1, "slow"), backward(2, "backward", "inside")),
        seen(1, at("barrier"), backward(1, "backward"), inside("barrier", 1, at("barrier"))),
    ])  # fmt: skip
    assert verdict.cause == "left"
    assert at("slow").rpartition("/")[2] in verdict.sentence
    verdict = find_culprit([seen(0, "", doing="gone", code=0), seen(1, at("save"))])
    assert (verdict.cause, verdict.culprits) == ("absent", (1,))
    failed = call("all_reduce", 4, at("all_reduce"), state="raised")
    verdict = find_culprit([
        seen(0, "", failed, doing="gone", code=1),
        seen(1, "", call("all_reduce", 3, at("all_reduce")), doing="gone", code=0, steps=3),
    ])  # fmt: skip
    assert (verdict.cause, verdict.culprits) == ("ended", (1,))
    waits = seen(0, at("all_reduce"), inside("all_reduce", 812, at("all_reduce")), steps=29)
    slow = seen(1, at("slow"), call("all_reduce", 811, at("all_reduce")), steps=29)
    verdict = verdict_on([told(waits), told(slow, "node2")], 2, may_be_slow=True)
    file, _, line = at("slow").rpartition(":")
    waiting = verdict.stall.pop("waiting_in")
    assert verdict.stall == {"rank": 1, "host": "node2", "file": file, "line": int(line)}
    assert waiting.startswith("all_reduce #812 of ")
    assert "rank 1 on node2 has not entered all_reduce #812" in verdict.message
    waits = seen(0, at("all_reduce"), inside("all_reduce", 4, at("all_reduce")))
    verdict = verdict_on([told(waits)], 2, may_be_slow=False)
    assert (verdict.rank, verdict.stall["host"]) == (1, "")
    wait = inside("a collective", 1, at("all_reduce"), group="peer:")
    waits = told(doing(seen(0, at("barrier"), wait, steps=29), pulses.TIMED_OUT), still_s=1.0)
    slow = seen(1, at("slow"), steps=29)
    found = verdict_on([waits, told(slow, "node2")], 2, may_be_slow=False)
    assert "rank 1 on node2 took no part in step 30 for 15 s" in found.message
    found = verdict_on([waits, told(doing(slow, "evaluation"))], 2, may_be_slow=False)
    assert "the evaluation after step 29" in found.message


@pytest.mark.parametrize("state", ["inside", "left"])
def test_tensors_that_differ_are_a_cause_where_the_ranks_have_not_gone_on(at, state):
    def calls(shape):
        first = call("all_gather", 3, at("all_reduce"), detail=shape, state=state)
        return first, inside("barrier", 4, at("barrier"))

    stands = [seen(0, at("barrier"), *calls("[2]")), seen(1, at("barrier"), *calls("[3]"))]
    verdict = find_culprit(stands)
    assert verdict.cause == ("shapes" if state == "inside" else "unknown")


@pytest.mark.parametrize("state", ["inside", "raised"])
def test_ranks_that_died_in_calls_that_do_not_meet_are_named_and_no_others(at, state):
    def died(*details):
        first, where = call("barrier", 3, detail="[1]"), at("slow")
        calls = [(first, call("all_gather", 4, where, detail=d, state=state)) for d in details]
        return mismatch(
            [pulses.RankPulse(rank=rank, calls=made) for rank, made in enumerate(calls)]
        )

    verdict = died("[4]", "[7]")
    assert (verdict.cause, verdict.culprits) == ("shapes", (0, 1))
    assert verdict.places == dict.fromkeys((0, 1), at("slow"))
    assert died("[4]", "[4]", "[7]").culprits == (2,)
    assert died("[4]", "[4]") is died("[4]") is died() is None, "as where a node was lost"
    after = pulses.RankPulse(rank=0, calls=(call("gather", 1, detail="[4]"),))
    other = pulses.RankPulse(rank=1, calls=(call("gather", 1, detail="[7]"),))
    assert mismatch([after, other]) is None, "they have ended after it"


@pytest.mark.parametrize(
    ("word", "cause"), [("slow", "absent"), ("barrier", "left"), ("save", "left")]
)
def test_a_rank_has_left_the_loop_of_the_steps_and_not_that_of_a_step_s_tensors(at, word, cause):
    steps = [call("backward", n, at("backward"), group="backward") for n in (1, 2)]
    reductions = [call("all_reduce", n, at("all_reduce")) for n in (1, 2)]
    verdict = find_culprit([
        seen(0, at("all_reduce"), *steps, *reductions, inside("all_reduce", 3, at("all_reduce"))),
        seen(1, at(word), *steps, *reductions, steps=2),
    ])  # fmt: skip
    assert (verdict.cause, verdict.culprits) == (cause, (1,))
    assert ("after 2 steps" in verdict.sentence) == (cause == "left")


@pytest.mark.parametrize("module", [world, gradients, dist.distributed_c10d])
def test_a_wait_whose_call_was_not_noted_is_told_by_the_files_that_it_stands_in(at, module):
    ranks = [seen(rank, at("all_reduce"), steps=4) for rank in (0, 1)]
    frame = StackFrame(module.__file__, 9, "reduce")
    waits = dataclasses.replace(ranks[0], frames=(frame, *ranks[0].frames))
    verdict = find_culprit([waits, seen(1, at("slow"), steps=4, doing="computes")])
    assert verdict.culprits == (1,)
    assert verdict.does[0].startswith("waits in reduce")


def test_without_a_line_of_the_user_s_the_place_is_samestep_s_but_not_of_the_watch():
    frames = [(module.__file__, 7, "f") for module in (dist.distributed_c10d, pulses, world)]
    assert pulses.users_place(frames) == f"{world.__file__}:7"
    assert pulses.users_place([("/home/me/train.py", 3, "main"), *frames]) == "/home/me/train.py:3"


def told(stand, host="node1", still_s=15.0):
    return StandReport(stand=stand, host=host, at=stand.pulse.moved + still_s)


def test_what_a_rank_tells_is_read_by_another_node_as_it_was(tmp_path, at):
    stand = seen(1, at("all_reduce"), call("barrier", 3), inside("all_reduce", 4), steps=7)
    (tmp_path / pulses.STACKS.format(rank=1)).write_text("Thread 0x1\n")
    write_report(stand, tmp_path, tmp_path)
    (read,) = read_reports(tmp_path, 0.0)
    assert (read.stand.frames, read.stand.doing) == (stand.frames, stand.doing)
    assert [v[:5] for v in read.stand.pulse.calls] == [v[:5] for v in stand.pulse.calls]
    assert read_reports(tmp_path, read.at + 1) == [], "of an earlier start"
    assert at("all_reduce") in (tmp_path / TEXT.format(rank=1)).read_text()
    assert find_culprit([read.stand]).places == find_culprit([stand]).places


def doing(stand, what):
    return dataclasses.replace(stand, pulse=dataclasses.replace(stand.pulse, doing=what))


@pytest.mark.parametrize("kind", ["computes", "compiles"])
def test_ranks_that_only_take_long_are_no_stall_until_they_take_much_longer(at, kind):
    stands = [seen(rank, at("slow"), doing="computes") for rank in (0, 1)]
    if kind == "compiles":
        frame = StackFrame("/x/site-packages/torch/_inductor/async_compile.py", 9, "wait")
        waits = seen(0, at("all_reduce"), inside("all_reduce", 1, at("all_reduce")))
        busy = dataclasses.replace(stands[1], doing="sleeps", frames=(frame, *stands[1].frames))
        stands = [waits, busy]
    both = [told(stand) for stand in stands]
    assert verdict_on(both, 2, may_be_slow=True) is None
    assert verdict_on(both, 2, may_be_slow=False) is not None


@pytest.fixture
def pulse(tmp_path):
    opened = pulses.Pulse(tmp_path, 3)
    yield opened
    opened.close()


def test_a_pulse_says_the_steps_the_calls_and_the_end(pulse, tmp_path):
    for number in range(1, 101):
        pulse.step(number)
        with pulse.inside("all_reduce", "float32[2]", "train.py:7", pulses.WORLD):
            pass
    (read,) = pulses.read_pulses(tmp_path)
    assert (read.rank, read.pid, read.steps, read.code) == (3, os.getpid(), 100, None)
    assert len(read.step_times) == 63
    assert min(read.step_times) > 0
    assert [visit.seq for visit in read.calls] == [*range(37, 101)]
    assert {visit[:3] for visit in read.calls} == {("all_reduce", "float32[2]", "train.py:7")}
    assert {visit.state for visit in read.calls} == {"left"}
    assert time.monotonic() - read.moved < 60
    pulse.ended(3)
    assert pulses.read_pulse(tmp_path / "pulse-rank-3").code == 3


def test_the_innermost_call_is_told_and_the_outer_one_again_after_it(pulse, tmp_path):
    def now():
        return pulses.read_pulse(tmp_path / "pulse-rank-3").now

    with pulse.inside("backward", group="backward"):
        for _ in range(70):  # more than are kept
            with pulse.inside("all_gather", group=pulses.WORLD):
                assert now().kind == "all_gather"
            assert now().kind == "backward"
    assert now() is None
    with pytest.raises(ValueError, match="no"), pulse.inside("barrier", group=pulses.WORLD):
        raise ValueError("no")
    assert pulses.read_pulse(tmp_path / "pulse-rank-3").calls[-1].state == "raised"


def test_a_long_path_keeps_its_line_number_and_what_is_no_pulse_yet_is_none(pulse, tmp_path):
    with pulse.inside("barrier", "x" * 999, "/é" * 300 + ".py:123", pulses.WORLD):
        assert pulses.read_pulse(tmp_path / "pulse-rank-3").now.where.endswith(".py:123")
        assert pulses.read_pulse(tmp_path / "pulse-rank-3").now.group == pulses.WORLD
    assert pulses.read_pulse(tmp_path / "pulse-rank-0") is None
    (tmp_path / "pulse-rank-0").write_bytes(bytes(100_000))
    assert pulses.read_pulse(tmp_path / "pulse-rank-0") is None


def call_everything(folder):
    noted = []
    rank = int(os.environ["RANK"])
    pulse = pulses.Pulse(folder, rank)
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
        funcol.all_reduce(x, "max", dist.group.WORLD)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        x.requires_grad_().sum().backward()
        dist.destroy_process_group()
    assert dist.all_reduce is all_reduce
    (own,) = (read for read in pulses.read_pulses(folder) if read.rank == rank)
    shapes = [
        (kind, [tuple(tensor.shape) for tensor in tensors], group, now.seq, now.detail)
        for kind, tensors, _where, group, now in noted
    ]
    return shapes, [visit.kind for visit in own.calls], {visit.where for visit in own.calls}


def test_each_collective_is_noted_once_with_what_must_be_alike(tmp_path):
    (zero, kinds, places), (one, _, _) = run_ranks(call_everything, 2, tmp_path, tmp_path)
    shared = [
        ("all_reduce", [(2, 3)], pulses.WORLD, 1, "float32[2, 3] op=MAX"),
        ("all_gather_object", [], pulses.WORLD, 2, ""),
        ("broadcast", [(2, 3)], pulses.WORLD, 3, "float32[2, 3] src=1"),
        ("barrier", [], pulses.WORLD, 4, ""),
        ("all_reduce", [(2, 3)], pulses.WORLD, 5, "float32[2, 3] op=MAX"),
    ]
    assert one == shared
    # The group of one is rank 0's alone.
    ((kind, _, group, seq, _),) = [call for call in zero if call not in shared]
    assert (kind, group.rpartition(":")[2], seq) == ("broadcast", "0", 1)
    assert kinds == [
        *("init_process_group", "all_reduce", "all_gather_object", "new_group", "broadcast"),
        *("broadcast", "barrier", "all_reduce", "send", "backward", "destroy_process_group"),
    ]
    assert all(place.startswith(f"{__file__}:") for place in places)


STALL_S = 1.5


@contextmanager
def two_ranks(folder, how):
    """Yield what gives the pulses of two ranks, until they have ended; in the end, kill them."""
    folder.mkdir(parents=True)
    ranks = start_ranks(stuck.run, 2, folder / "output", folder, how)
    until = time.monotonic() + TIMEOUT_S / 4

    def seen_until_the_end():
        while any(process.is_alive() for process in ranks.processes):
            assert time.monotonic() < until, ranks.output()
            of_ranks = pulses.read_pulses(folder)
            # The first steps of all: a process may start seconds after another.
            if len(of_ranks) == 2 and all(pulse.calls for pulse in of_ranks):
                yield of_ranks
            time.sleep(0.02)

    try:
        yield seen_until_the_end()
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
    folder = tmp_path / "stall"
    with two_ranks(folder, how) as seen_by_now:
        of_ranks = next(found for found in seen_by_now if find_stall(found, STALL_S))
        begin, still = time.monotonic(), find_stall(of_ranks, STALL_S)
        verdict = find_culprit(inspect_ranks(folder, of_ranks))
        assert still - STALL_S + time.monotonic() - begin < 60
        assert verdict.cause == cause, verdict
        assert list(verdict.culprits) == culprits, verdict
        for rank, mark in places.items():
            assert verdict.places[rank] == stuck.line_of(mark), verdict
        if how == "waits_later":  # the call that it waits for is known
            assert "all_reduce #1 " in verdict.does[0]


def test_each_functional_collective_names_the_rank_that_does_not_come(tmp_path):
    """And `_reconfigure`, where PyTorch has it."""
    folder, met = tmp_path / "stall", []
    with two_ranks(folder, "each") as seen_by_now:
        for found in seen_by_now:
            waits, late = found[0].now, found[1].doing
            if late not in ("", *met) and waits and waits.kind == late == found[0].doing:
                verdict = find_culprit(inspect_ranks(folder, found))
                assert (verdict.culprits, verdict.cause) == ((1,), "absent"), verdict
                assert late in verdict.does[0]
                assert verdict.places[1] == stuck.line_of("late_for_each"), verdict
                assert late == "_reconfigure" or verdict.places[0] == stuck.line_of("each")
                met.append(late)
                (folder / late).touch()
    names = ["_reconfigure"] * stuck.RECONFIGURES + [name for name, _ in stuck.newest()]
    assert met == names
    assert "all_reduce" in names
