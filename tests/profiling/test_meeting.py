"""Ranks of one script find each other in a directory, whatever was left there before."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from samestep.profiling.meeting import Left, Meeting


def meet(folder, rank, *, answer, found, ends=True):
    """Take part in a meeting of two ranks; return what was agreed and what all have found."""
    meeting = Meeting(folder=folder, rank=rank, world_size=2)
    meeting.join()
    agreed = [meeting.agree(lambda: answer) for _ in range(3)]
    meeting.tell(found + rank)
    told = meeting.told() if rank == 0 else None
    if rank == 0 and ends:
        meeting.close()
    return agreed, told


def both(folder, **what):
    with ThreadPoolExecutor(2) as pool:
        # Rank 1 comes first, so that it sees what is left before rank 0 can take it away.
        ranks = [pool.submit(meet, folder, rank, **what) for rank in (1, 0)]
        return [rank.result(timeout=60) for rank in reversed(ranks)]


def test_all_ranks_hear_what_rank_0_says_and_rank_0_what_all_have_found(tmp_path):
    (agreed, told), (also_agreed, _) = both(tmp_path, answer=True, found=10)
    assert agreed == also_agreed == [True] * 3
    assert told == [10, 11]
    assert not list(tmp_path.iterdir())


def test_what_a_killed_start_left_is_not_taken_for_this_starts(tmp_path):
    both(tmp_path, answer=True, found=10, ends=False)
    assert list(tmp_path.iterdir())
    (agreed, told), (also_agreed, _) = both(tmp_path, answer=False, found=20)
    assert agreed == also_agreed == [False] * 3
    assert told == [20, 21]
    assert not list(tmp_path.iterdir())


def test_a_rank_that_waits_for_one_that_has_ended_notices_at_once(tmp_path):
    def leave():
        first = Meeting(folder=tmp_path, rank=0, world_size=2)
        first.join()
        first.agree(lambda: True)
        first.end(7)

    def stay():
        second = Meeting(folder=tmp_path, rank=1, world_size=2)
        second.join()
        assert second.agree(lambda: False)
        with pytest.raises(Left) as left:
            second.agree(lambda: False)
        return left.value.steps

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(stay), pool.submit(leave)]
        assert [rank.result(timeout=60) for rank in ranks] == [7, None]
