"""A script that hangs is told who is missing, and where."""

from types import SimpleNamespace

import pytest

from samestep.base.errors import UserError
from samestep.scripts.checking import ranks_of_script
from samestep.scripts.checking.findings import RULES, Found, NotSeen
from samestep.scripts.checking.seen import Stall
from tests.checking.planted import check, found_in, line_of, planted

STEP = "            optimizer.step()\n"


@pytest.mark.parametrize(("culprit", "blamed", "hangs"), [
    (1, "time.sleep(900)", "if rank == 1 and epoch:\n                time.sleep(900)\n"),
    (0, "while rank == 0", "while rank == 0 and epoch: pass\n"),
], ids=["a rank sleeps", "rank 0 spins"])  # fmt: skip
def test_a_hanging_script_is_ended_and_told_who_is_missing_where(culprit, blamed, hangs, tmp_path):
    change = (STEP, f"{STEP}            {hangs}")
    text = planted(change, ("import os\n", "import os\nimport time\n"))
    waits = f"train.py:{line_of(text, 'loss.backward()')}"
    found = found_in(tmp_path, text, "SS606", blamed, waits, stall_s=1.5)
    assert found.evidence.startswith(f"Rank {culprit} ")
    assert found.remedy


@pytest.mark.parametrize(("leaves", "blamed", "told"), [
    ("break", "dist.all_reduce(counts)", "Rank 1 left the loop after 5 "),
    ("return", "return", "Rank 1 ended with exit code 0 after 5 steps"),
])  # fmt: skip
def test_a_rank_that_leaves_the_loop_is_told_with_the_line_to_blame(leaves, blamed, told, tmp_path):
    text = planted((STEP, f"{STEP}            if rank == 1 and epoch:\n                {leaves}\n"))
    found_in(tmp_path, text, "SS601", blamed, told)


def test_a_rank_that_aborts_in_a_call_is_told_with_the_line_that_each_rank_waits_in(tmp_path):
    """As Gloo's own thread may, on a message of a wrong size: no exception is raised."""
    aborts = "[threading.Timer(0.5, os.abort).start(), dist.recv(torch.zeros(1), src=0)]"
    leave = f"            if rank == 1 and epoch: {aborts}\n"
    text = planted((STEP, STEP + leave), ("import os\n", "import os\nimport threading\n"))
    (found,) = check(tmp_path, text).findings
    assert found.code == "SS601"
    for call in ("dist.recv", "loss.backward()"):
        assert f"train.py:{line_of(text, call)}" in found.evidence


def test_a_rank_that_a_signal_ends_fails_by_itself(tmp_path):
    crash = f"{STEP}            if rank == 1 and epoch: os.kill(os.getpid(), 11)\n"
    with pytest.raises(UserError, match="fails by itself: exit code -11 on rank 1 after 5 steps"):
        check(tmp_path, planted((STEP, crash)))


@pytest.mark.parametrize(("steps", "told"), [(0, NotSeen), (7, Found)])
def test_a_rank_that_a_script_ended_itself_before_the_first_step_is_no_hang(steps, told):
    """As `mp.spawn` ends the others where one fails, which has a message of its own."""
    stall = Stall(where="train.py:3", sentence="Rank 1 was ended or killed.", gone=True)
    ranks = [SimpleNamespace(exit_code=None, steps=steps)] * 2
    (found,) = RULES["SS606"].apply(SimpleNamespace(stall=stall, ranks=ranks, world_size=2))
    assert isinstance(found, told)


def test_ranks_that_wait_for_one_that_waits_for_a_core_do_not_hang(monkeypatch, tmp_path):
    """A rank that can run, and has computed for less than a stall lasts, is on a busy machine."""
    pulse = SimpleNamespace(pid=7, rank=0, moved=1.0, step_times=())
    computed = [5.0, 5.9, 6.1]

    def looked(*_):
        raise LookupError

    monkeypatch.setattr(ranks_of_script, "find_stall", lambda *_: "still")
    monkeypatch.setattr(ranks_of_script, "computed_s", lambda _pid: computed.pop(0))
    monkeypatch.setattr(ranks_of_script, "working", lambda _pids: {7: computed.pop(0)})
    monkeypatch.setattr(ranks_of_script, "inspect_ranks", looked)
    moves = {}
    assert ranks_of_script._stalled(tmp_path, [pulse], 1.0, moves) is None
    with pytest.raises(LookupError):  # it spins: now it is looked at
        ranks_of_script._stalled(tmp_path, [pulse], 1.0, moves)
