"""How ranks live: their numbers, the order of their collectives, how they end."""

from threading import Thread
from types import SimpleNamespace

import pytest

from samestep import UserError
from samestep.scripts.checking import recorder
from tests.checking.planted import check, codes, found_in, line_of, planted

REDUCE = "        dist.all_reduce(counts)\n"
INIT = '    dist.init_process_group("gloo")\n'
MAIN = 'if __name__ == "__main__":\n    main()\n'
STEP = "            optimizer.step()\n"
OTHERWISE = """\
        if rank == 0:
            dist.all_reduce(counts)  # rank 0
        else:
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
"""
IN_ANOTHER_ORDER = """\
        other = torch.zeros(3)
        if rank == 0:
            dist.all_reduce(counts)
            dist.all_reduce(other)  # second
        else:
            dist.all_reduce(other)  # first
            dist.all_reduce(counts)  # last
"""
OTHER_RANKS = """\
    rank = int(os.environ.get("SLURM_PROCID", 0))
    world_size = int(os.environ.get("SLURM_NTASKS", 1))
    place = f"file://{os.getcwd()}/{os.getpid()}"
    dist.init_process_group("gloo", place, rank=rank, world_size=world_size)
"""
FAILS = f"""\
{STEP}\
            if rank == 1 and epoch == 1:
                raise ValueError("a bad sample")
"""
FORGETS = """\
if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print("failed:", error)
"""


def test_a_collective_that_means_something_else_on_one_rank_is_found_with_both_lines(tmp_path):
    text = planted((REDUCE, OTHERWISE))
    # The ranks now have different numbers, of which another rule may tell.
    found = found_in(tmp_path, text, "SS601", "ReduceOp.MAX", beside=["SS404"])
    assert found.evidence.startswith("collective 1:")
    for words in ("all_reduce(float32[2], SUM)", "all_reduce(float32[2], MAX)"):
        assert words in found.evidence
    assert f"train.py:{line_of(text, '# rank 0')}" in found.evidence


def test_collectives_in_another_order_are_found_although_the_script_hangs(tmp_path):
    text = planted((REDUCE, IN_ANOTHER_ORDER))
    told = ("float32[2]", "float32[3]")
    found_in(tmp_path, text, "SS601", "# first", *told, seconds=2)


def test_ranks_that_take_themselves_for_others_are_found(tmp_path):
    text = planted((INIT, OTHER_RANKS))
    told = ("process 1: rank 0 of 1", "SLURM_PROCID")
    results = ("SS101", "SS501")  # each of them trains on all samples, and saves
    found = found_in(tmp_path, text, "SS604", "SLURM_PROCID", *told, beside=results)
    assert found.severity == "error"


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_cannot_begin_beside_another_rank_0_fails_for_that_reason_alone(
    first, tmp_path
):
    """Whichever has the port first trains, and saves as its rank 0."""
    own = """\
    import time
    from pathlib import Path
    mine, is_first = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)), os.environ["RANK"] == "FIRST"
    while not is_first and not Path("begun").exists():
        time.sleep(0.01)  # a file can only be asked for
    try:
        dist.init_process_group("gloo", rank=mine, world_size=1)
    except BaseException:
        Path("failed").touch()
        raise
    Path("begun").touch()
    while is_first and not Path("failed").exists():
        time.sleep(0.01)  # as above
    rank = dist.get_rank()
"""
    assert codes(check(tmp_path, planted((INIT, own.replace("FIRST", str(first)))))) == {"SS604"}


def test_a_rank_that_fails_by_itself_is_told_with_its_own_traceback(tmp_path):
    """The others lose it within a collective, which is no mistake of theirs."""
    text = planted(("    loss_of = ", "    rank and open('/no/such/notes')\n    loss_of = "))
    with pytest.raises(UserError, match=r"fails by itself: exit code 1 on rank 1 (?s:.*)notes'$"):
        check(tmp_path, text)


def test_a_failure_is_noted_beside_a_mistake_that_was_found_before(tmp_path):
    fails = (STEP, f"{STEP}            0 / 0\n")
    text = planted(("torch.manual_seed(0)", "torch.manual_seed(rank)"), ("DDP(", "("), fails)
    assert any("ZeroDivisionError" in said for said in check(tmp_path, text).notes)


COUNTS = """\
        batches = iter(list(iter(train_loader)) if epoch < 2 else iter(train_loader))
        for _ in range(4):
            inputs, labels = next(batches)
"""


@pytest.mark.parametrize(("old", "new", "error"), [
    ("        for inputs, labels in train_loader:\n", COUNTS, "StopIteration"),
    ("accuracy = float", "assert counts[1] == 32; accuracy = float", "AssertionError"),
], ids=["reads on", "evaluates all"])  # fmt: skip
def test_a_script_that_counts_on_batches_cut_off_is_judged_until_there(old, new, error, tmp_path):
    report = check(tmp_path, planted((old, new)))
    assert (report.findings, report.steps) == ([], 2 * 4 + 1)
    assert any(error in note for note in report.notes)


def test_a_failure_that_is_printed_and_forgotten_is_found_by_its_exit_code(tmp_path):
    text = planted((STEP, FAILS), (MAIN, FORGETS))
    told = "(a bad sample) in step 6"
    found = found_in(tmp_path, text, "SS605", "raise ValueError", told, seconds=10)
    assert found.evidence.startswith("rank 1 ended with exit code 0 after ValueError")


def test_a_collective_over_a_column_is_found_and_one_over_a_transposed_matrix_is_not(tmp_path):
    dense = "        both = torch.stack([counts, counts], 1)\n        dist.all_reduce(both.t())\n"
    text = planted((REDUCE, dense + "        dist.all_reduce(both[:, 0])\n" + REDUCE))
    assert found_in(tmp_path, text, "SS607", "dist.all_reduce(both[:, 0])", "strides [2]")


OF_A_VARIABLE = """\
    variable = "SLURM_PROCID" if "SLURM_PROCID" in os.environ else "RANK"
    rank = int(os.environ[variable])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    alone = [dist.new_group([one]) for one in range(2)][rank]
"""
MANY = """\
        dist.all_reduce(counts)
        for source in range(2):
            if source == rank:
                dist.broadcast(counts, source)
            else:
                dist.broadcast(torch.zeros(2), source)
        gathered = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
        dist.gather(counts, gathered)
        dist.all_gather_object([None, None], 'x' * (rank * 99))
        dist.all_reduce(torch.zeros(1 + rank), group=alone)
        sent = torch.zeros(3)
        parts = [1 + rank] * 2, [1, 2]
        dist.all_to_all_single(torch.zeros(2 + 2 * rank), sent, *parts)
        try:
            if epoch == 1:
                model(torch.zeros(1, 99))
        except RuntimeError as error:
            print("does without", error)
"""
ENDS_EARLY = """\
class Enough(Exception):
    pass
if __name__ == "__main__":
    try:
        main()
    except Enough as error:
        print(error)
        dist.destroy_process_group()
    try:
        open("missing.txt")
    except OSError as error:
        print(error)
        exit(0)
"""


def test_collectives_numbers_and_exceptions_that_are_right_are_no_finding(tmp_path):
    enough = "        scheduler.step()\n        if epoch == 2:\n            raise Enough\n"
    text = planted(
        *((INIT, OF_A_VARIABLE), (REDUCE, MANY), (MAIN, ENDS_EARLY)),
        ("        scheduler.step()\n", enough),
    )
    assert check(tmp_path, text).findings == []


def test_what_another_thread_does_while_a_watcher_works_is_noted(tmp_path):
    hooks = SimpleNamespace(steps=0, epochs=0, evaluating=False)
    job = recorder.Job(script="", folder=str(tmp_path))
    notes = recorder.Recorder(job, 0, hooks, scratch=None)
    with notes.unwatched():
        for run in (Thread.run, Thread.start):  # in this thread, then in its own
            run(thread := Thread(target=notes.note, args=[recorder.ev.Remark(run.__name__)]))
    thread.join()
    notes.pulse.close()
    text = recorder.events_path(tmp_path, 0).read_text()
    assert ('"start"' in text, '"run"' in text) == (True, False)
