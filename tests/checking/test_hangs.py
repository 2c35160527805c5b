"""A script that hangs is told who is missing, and where."""

import pytest

from tests.checking.planted import check, line_of, planted

STEP = "            optimizer.step()\n"
CASES = {
    "a rank sleeps": "            if rank == 1 and epoch:\n                time.sleep(900)\n",
    "rank 0 spins": "            while rank == 0 and epoch: pass\n",
}
BLAMED = {"a rank sleeps": "time.sleep(900)", "rank 0 spins": "while rank == 0"}


@pytest.mark.parametrize("case", CASES)
def test_a_script_that_hangs_is_ended_and_told_who_is_missing_where(case, tmp_path):
    text = planted((STEP, STEP + CASES[case]), ("import os\n", "import os\nimport time\n"))
    report = check(tmp_path, text, stall_s=1.5)
    (found,) = [finding for finding in report.findings if finding.code == "SS606"]
    culprit = 0 if case.startswith("rank 0") else 1
    assert found.evidence.startswith(f"Rank {culprit} ")
    assert found.remedy
    assert (found.file, found.line) == ("train.py", line_of(text, BLAMED[case]))
    assert f"train.py:{line_of(text, 'loss.backward()')}" in found.evidence


def test_a_rank_that_leaves_the_loop_and_meets_the_others_in_another_collective_is_named(tmp_path):
    leave = "            if rank == 1 and epoch:\n                break\n"
    text = planted((STEP, STEP + leave))
    report = check(tmp_path, text)
    (found,) = report.findings
    assert (found.code, found.line) == ("SS601", line_of(text, "dist.all_reduce(counts)"))
    assert found.evidence.startswith("Rank 1 left the loop after 5 ")
    assert f"train.py:{line_of(text, 'loss.backward()')}" in found.evidence


def test_a_rank_that_aborts_in_a_call_is_told_with_the_line_that_each_rank_waits_in(tmp_path):
    """As Gloo's own thread may, on a message of a wrong size: no exception is raised."""
    leave = (
        "            if rank == 1 and epoch:\n"
        "                threading.Timer(0.5, os.abort).start()\n"
        "                dist.recv(torch.zeros(1), src=0)\n"
    )
    text = planted((STEP, STEP + leave), ("import os\n", "import os\nimport threading\n"))
    (found,) = check(tmp_path, text).findings
    assert found.code == "SS601"
    for call in ("dist.recv", "loss.backward()"):
        assert f"train.py:{line_of(text, call)}" in found.evidence
