"""The command as it is, on real ranks, each with one fault planted in one of them."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ranks import Ranks, free_port, start_ranks

QUICK = ("--budget-s", "1", "--json")
KEYS = {"name", "status", "found", "advice"}


def doctor(
    folder: Path, plant: str = "", *options: str, world_size: int = 2, port: int = 0
) -> Ranks:
    """Start doctor on ranks that are a node each, in `folder`; rank 1 (or 0) has a fault."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return start_ranks(
        _rank, world_size, folder / "output", work, plant, [*QUICK, *options], port
    )  # fmt: skip


def _rank(work: Path, plant: str, arguments: list[str], port: int) -> None:
    number = os.environ.get("RANK", "0")
    if "WORLD_SIZE" in os.environ:  # every rank is its node's first, whose folder is looked at
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": number,
                       "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"]}  # fmt: skip
    if port:
        os.environ["MASTER_PORT"] = str(port)
    os.chdir(work)
    kept = PLANTS[plant](int(number), work) if plant else None
    from samestep.cli import main

    code = main(["doctor", *arguments])
    del kept
    sys.exit(code)


def _no_name_on_1(rank: int, work: Path) -> None:
    if rank == 1:
        os.environ["MASTER_ADDR"] = "no-such-host.invalid"


def _no_name(rank: int, work: Path) -> None:
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"


def _foreign_name(rank: int, work: Path) -> None:
    if rank == 0:
        os.environ["MASTER_ADDR"] = "192.0.2.77"  # of a net for documentation


def _port_taken(rank: int, work: Path) -> socket.socket | None:
    if rank == 1:
        return None
    other = socket.socket()
    other.bind(("", int(os.environ["MASTER_PORT"])))
    other.listen()
    return other


def _elsewhere_on_1(rank: int, work: Path) -> None:
    place = work / f"node{rank}"
    place.mkdir()
    (place / "runs").mkdir()
    os.chdir(place)


def _unwritable_on_1(rank: int, work: Path) -> None:
    _elsewhere_on_1(rank, work)
    if rank == 1:
        Path("runs").rmdir()
        Path("runs").write_text("a file, in which nobody makes a folder, not even root")


def _other_torch_on_1(rank: int, work: Path) -> None:
    import torch

    if rank == 1:
        torch.__version__ = "2.12.0"


def _other_code_on_1(rank: int, work: Path) -> None:
    from samestep.doctor.facts import machine

    if rank == 1:
        machine.hash_of_code = lambda: "bbbb"


def _other_facts_on_1(rank: int, work: Path) -> None:
    from samestep.doctor import together

    if rank == 1:
        together.encode = lambda _: b'{"another": "samestep"}'


def _clock_ahead_on_1(rank: int, work: Path) -> None:
    from samestep.doctor import measure

    if rank == 1:
        measure.time = SimpleNamespace(
            time=lambda: time.time() + 100, perf_counter=time.perf_counter
        )


def _never_comes_1(rank: int, work: Path) -> None:
    if rank == 1:
        sys.exit(0)


def _killed_on_1(rank: int, work: Path) -> None:
    from samestep.doctor import measure

    if rank == 1:
        measure.products = lambda _: os.kill(os.getpid(), signal.SIGKILL)


def _no_memory_on_1(rank: int, work: Path) -> None:
    from samestep.doctor import measure

    def fail(*_):
        raise RuntimeError("out of memory")

    if rank == 1:
        measure.all_reduce = fail


def _half_a_launcher(rank: int, work: Path) -> None:
    os.environ["RANK"] = "0"
    os.environ["WORLD_SIZE"] = "2"


PLANTS = {name.removeprefix("_"): value for name, value in globals().items()
          if name.startswith("_") and not name.startswith("__") and name != "_rank"}  # fmt: skip


def table_of(ranks: Ranks) -> dict:
    """Return what rank 0 printed; nothing but the table, and no rank showed a traceback."""
    assert "Traceback" not in ranks.output()
    return json.loads(ranks.printed(0)[ranks.printed(0).index("{") :])


def reds(table: dict) -> dict[str, dict]:
    """Return the red rows by name; each comes with advice."""
    found = {row["name"]: row for row in table["checks"] if row["status"] == "red"}
    assert all(row["advice"] for row in found.values())
    return found


def test_one_process_alone_is_well_and_leaves_nothing(tmp_path):
    started = time.monotonic()
    ranks = doctor(tmp_path, world_size=1)
    assert ranks.wait() == [0], ranks.output()
    assert time.monotonic() - started < 10
    table = table_of(ranks)
    assert table["status"] in ("green", "yellow")
    assert all(row.keys() == KEYS for row in table["checks"])
    assert {"python", "cores", "shared memory", "run directory"} <= {
        row["name"] for row in table["checks"]
    }
    assert (table["all_reduce"], len(table["ranks"])) == ([], 1)
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_healthy_ranks_are_well_and_leave_nothing(tmp_path, world_size):
    ranks = doctor(tmp_path, world_size=world_size)
    assert ranks.wait() == [0] * world_size, ranks.output()
    table = table_of(ranks)
    assert reds(table) == {}
    assert [rank["rank"] for rank in table["ranks"]] == list(range(world_size))
    assert [size["bytes"] for size in table["all_reduce"]][:3] == [32, 1024, 32768]
    assert all(size["latency_us"] > 0 for size in table["all_reduce"])
    assert [ranks.printed(rank) for rank in range(1, world_size)] == [""] * (world_size - 1)
    assert list((tmp_path / "work").iterdir()) == []


# plant → (exit codes, the red rows, words of the first of them)
FAULTS = {
    "other_torch_on_1": ([1, 0], ["same versions"], "torch: "),
    "other_code_on_1": ([1, 0], ["same code"], "bbbb"),
    "clock_ahead_on_1": ([1, 0], ["clock"], "100.0 s ahead"),
    "elsewhere_on_1": ([1, 0], ["shared folder"], "rank 1 on"),
    "unwritable_on_1": ([1, 0], ["run directory", "shared folder"], "is a file, not a folder"),
    "other_facts_on_1": ([1, 0], ["roll call"], "rank 1 cannot be understood"),
    "never_comes_1": ([1, 0], ["roll call"], "rank 1 of 2 never came within 4 s"),
    "no_name_on_1": ([1, 1], ["roll call"], "rank 1 of 2 never came"),
    "no_name": ([1, 1], ["master address"], "no-such-host.invalid does not resolve"),
    "foreign_name": ([1, 1], ["master address"], "not an address of rank 0's host"),
    "port_taken": ([1, 1], ["master port"], "is taken"),
    "killed_on_1": ([1, -9], ["connection"], "lost at timing products"),
    "no_memory_on_1": ([1, 1], ["connection"], "timing the all-reduce"),
}


@pytest.mark.parametrize("plant", FAULTS)
def test_each_planted_fault_is_a_red_row_with_advice_and_nobody_hangs(tmp_path, plant):
    codes, names, words = FAULTS[plant]
    started = time.monotonic()
    ranks = doctor(tmp_path, plant, "--timeout-s", "4")
    assert ranks.wait() == codes, ranks.output()
    assert time.monotonic() - started < 40
    table = table_of(ranks)
    assert table["status"] == "red"
    assert list(reds(table)) == names
    assert words in reds(table)[names[0]]["found"]


CUT_OFF = {
    "no_name_on_1": "master address: no-such-host.invalid does not resolve. Set MASTER_ADDR",
    "port_taken": "Rank 0 did not answer at 127.0.0.1:",
}


@pytest.mark.parametrize("plant", CUT_OFF)
def test_a_rank_that_cannot_reach_rank_0_says_so_in_one_line(tmp_path, plant):
    ranks = doctor(tmp_path, plant, "--timeout-s", "3")
    assert ranks.wait() == [1, 1]
    (line,) = ranks.printed(1).splitlines()
    assert re.match(r"samestep: \[rank 1 on \S+\] ", line)
    assert CUT_OFF[plant] in line


def test_a_launcher_that_ends_rank_0_early_still_gets_the_table(tmp_path):
    port = free_port()
    ranks = doctor(tmp_path, "never_comes_1", "--timeout-s", "60", port=port)
    deadline = time.monotonic() + 30
    connected = False
    while not connected:  # until rank 0 waits for the other one
        assert time.monotonic() < deadline, ranks.output()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            connected = True
    # The store listens a moment before the signal is awaited.
    time.sleep(0.5)
    ranks.processes[0].terminate()
    assert ranks.wait(20)[0] == 1, ranks.output()
    assert "when the launcher ended this" in reds(table_of(ranks))["roll call"]["found"]


def test_contradicting_variables_of_a_launcher_are_one_red_row(tmp_path):
    ranks = doctor(tmp_path, "half_a_launcher", world_size=1)
    assert ranks.wait() == [1], ranks.output()
    (row,) = reds(table_of(ranks)).values()
    assert row["name"] == "launcher"
    assert "LOCAL_RANK is not" in row["found"]


def test_a_device_that_is_not_here_is_one_red_row_and_the_rest_is_measured(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    ranks = doctor(tmp_path, "", "--device", "cuda")
    assert ranks.wait() == [1, 0], ranks.output()
    assert list(reds(table_of(ranks))) == ["device"]
    assert table_of(ranks)["all_reduce"]


def test_a_recipe_file_is_looked_for_on_every_rank(tmp_path):
    ranks = doctor(tmp_path, "", "mine.py")
    assert ranks.wait() == [1, 0], ranks.output()
    assert "not there for ranks 0, 1" in reds(table_of(ranks))["recipe"]["found"]
    (tmp_path / "work" / "mine.py").write_text("recipe = None")
    ranks = doctor(tmp_path, "", "mine.py")
    assert ranks.wait() == [0, 0], ranks.output()


@pytest.mark.parametrize(
    "mistake", [("--budget-s", "0"), ("--timeout-s", "-1"), ("--num-workers", "-2"), ("--what",)]
)
def test_a_mistake_in_the_command_is_exit_code_2(tmp_path, mistake):
    ranks = doctor(tmp_path, "", *mistake, world_size=1)
    assert ranks.wait() == [2]
    assert mistake[0] in ranks.output()
    assert "Traceback" not in ranks.output()


def test_help_ends_with_two_examples(tmp_path):
    ranks = doctor(tmp_path, "", "--help", world_size=1)
    assert ranks.wait() == [0]
    assert len(re.findall(r"^  .*samestep doctor", ranks.output(), re.MULTILINE)) == 2
    assert ranks.output().rstrip().splitlines()[-3] == "examples:"
