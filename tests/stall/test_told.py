"""What ranks of several nodes tell of themselves, and the one verdict on them."""

import dataclasses

import pytest

from samestep.stall.judge import judge
from samestep.stall.pulse import STACKS, TIMED_OUT
from samestep.stall.stacks import StackFrame
from samestep.stall.told import TEXT, Told, read_told, tell, verdict_on
from tests.stall.test_judge import at, call, inside, seen

__all__ = ["at"]


def told(stand, host="node1", still_s=15.0):
    return Told(stand=stand, host=host, at=stand.pulse.moved + still_s)


def test_what_a_rank_tells_is_read_by_another_node_as_it_was(tmp_path, at):
    stand = seen(1, at("all_reduce"), call("barrier", 3), inside("all_reduce", 4), steps=7)
    (tmp_path / STACKS.format(rank=1)).write_text("Thread 0x1\n")
    tell(stand, tmp_path, tmp_path)
    (read,) = read_told(tmp_path, 0.0)
    assert (read.stand.frames, read.stand.doing) == (stand.frames, stand.doing)
    assert [v[:5] for v in read.stand.pulse.calls] == [v[:5] for v in stand.pulse.calls]
    assert read_told(tmp_path, read.at + 1) == [], "of an earlier start"
    assert at("all_reduce") in (tmp_path / TEXT.format(rank=1)).read_text()
    assert judge([read.stand]).places == judge([stand]).places


def test_the_verdict_has_the_rank_its_node_its_line_and_what_the_others_wait_in(at):
    waits = seen(0, at("all_reduce"), inside("all_reduce", 812, at("all_reduce")), steps=29)
    slow = seen(1, at("slow"), call("all_reduce", 811, at("all_reduce")), steps=29)
    verdict = verdict_on([told(waits), told(slow, "node2")], 2, may_be_slow=True)
    file, _, line = at("slow").rpartition(":")
    waiting = verdict.stall.pop("waiting_in")
    assert verdict.stall == {"rank": 1, "host": "node2", "file": file, "line": int(line)}
    assert waiting.startswith("all_reduce #812 of ")
    assert "rank 1 on node2 has not entered all_reduce #812" in verdict.message


def doing(stand, what):
    return dataclasses.replace(stand, pulse=dataclasses.replace(stand.pulse, doing=what))


def test_a_training_names_the_step_or_what_else_the_rank_did(at):
    wait = inside("a collective", 1, at("all_reduce"), group="peer:")
    waits = told(doing(seen(0, at("barrier"), wait, steps=29), TIMED_OUT), still_s=1.0)
    slow = seen(1, at("slow"), steps=29)
    found = verdict_on([waits, told(slow, "node2")], 2, may_be_slow=False)
    assert "rank 1 on node2 took no part in step 30 for 15 s" in found.message
    found = verdict_on([waits, told(doing(slow, "evaluation"))], 2, may_be_slow=False)
    assert "the evaluation after step 29" in found.message


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


def test_a_node_that_says_nothing_is_told_as_that(at):
    waits = seen(0, at("all_reduce"), inside("all_reduce", 4, at("all_reduce")))
    verdict = verdict_on([told(waits)], 2, may_be_slow=False)
    assert (verdict.rank, verdict.stall["host"]) == (1, "")
