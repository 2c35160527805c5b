"""The ranks of one script hear rank 0's answers, and rank 0 what all have found."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from samestep import UserError
from samestep.ranks.launch import Launch
from samestep.script.running import RankZeroEnded, ScriptRanks
from tests.processes import TIMEOUT_S, free_port


def rank(number, port, world_size=2, within_s=30.0):
    launch = Launch(rank=number, world_size=world_size, master_port=port)
    return ScriptRanks(launch, within_s)


def both(*functions, port=None):
    """Call a function for each rank, all at once; return what each returned."""
    port = port or free_port()
    with ThreadPoolExecutor(len(functions)) as pool:
        calls = [pool.submit(f, rank(number, port)) for number, f in enumerate(functions)]
        return [call.result(timeout=TIMEOUT_S) for call in calls]


def test_all_ranks_hear_what_rank_0_answers_and_a_single_one_answers_itself():
    def take_part(own):
        own.join()
        questions = iter(range(3))
        answers = [own.agree(lambda: next(questions) if own.rank == 0 else -1) for _ in range(3)]
        return answers, own.gather(f"found by {own.rank}")

    assert both(take_part, take_part) == [
        ([0, 1, 2], ["found by 0", "found by 1"]),
        ([0, 1, 2], []),
    ]
    alone = rank(0, 0, world_size=1)
    alone.join()
    assert alone.agree(lambda: 5) == 5
    alone.end(1)
    assert alone.gather("mine") == ["mine"]


def test_a_rank_that_waits_for_rank_0_learns_at_once_after_how_many_steps_it_ended():
    def leave(own):
        own.join()
        own.agree(lambda: True)
        own.end(7)
        own.gather("")

    def stay(own):
        own.join()
        assert own.agree(lambda: False)
        began = time.monotonic()
        with pytest.raises(RankZeroEnded) as ended:
            own.agree(lambda: False)
        own.gather("")
        return ended.value.steps, time.monotonic() - began < 60

    assert both(leave, stay) == [None, (7, True)]


def test_a_script_can_listen_where_its_ranks_have_met():
    def meet(own):
        own.join()
        own.leave()

    port = free_port()
    both(meet, meet, port=port)
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_never_comes_is_named(number):
    port = free_port()
    with pytest.raises(UserError, match=f"rank {1 - number}"):
        rank(number, port, within_s=0.3).join()
