"""The command as it is, on real ranks, each with faults planted in one of them."""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from samestep.cluster.doctor.between_ranks import _lost
from tests.doctor.situations import reds, rows_in, rows_of, says
from tests.processes import Ranks, env, start_ranks

QUICK = ("--budget-s", "0.5", "--json")
KEYS = {"name", "status", "found", "advice", "hosts"}


def doctor(folder: Path, plant: str = "", *options: str, world_size: int = 2) -> Ranks:
    """Start doctor on ranks that are a node each, in `folder`; rank 1 (or 0) has a fault."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return start_ranks(_rank, world_size, folder / "output", work, plant, [*QUICK, *options])


def _rank(work: Path, plant: str, arguments: list[str]) -> None:
    number = os.environ.get("RANK", "0")
    if "WORLD_SIZE" in os.environ:  # every rank is its node's first, whose folder is looked at
        nodes = f"GROUP_RANK={number} GROUP_WORLD_SIZE={os.environ['WORLD_SIZE']}"
        os.environ |= env(f"LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 {nodes}")
    os.chdir(work)
    kept = PLANTS[plant](int(number), work) if plant else None
    from samestep.shell.cli import main

    code = main(["doctor", *arguments])
    del kept
    sys.exit(code)


def _port_taken(rank: int, work: Path) -> socket.socket | None:
    if rank == 1:
        return None
    other = socket.socket()
    other.bind(("", int(os.environ["MASTER_PORT"])))
    other.listen()
    return other


def _differs_on_1(rank: int, work: Path) -> None:
    """Give rank 1 another torch, other code, another clock, and a place to run that is none."""
    import torch

    from samestep.cluster.doctor import measurements, node

    place = work / f"node{rank}"
    place.mkdir()
    os.chdir(place)
    if rank == 1:
        torch.__version__ = "2.12.0"
        node.hash_of_code = lambda: "bbbb"
        measurements.time = SimpleNamespace(
            time=lambda: time.time() + 100, perf_counter=time.perf_counter
        )
        Path("runs").write_text("a file, in which nobody makes a folder, not even root")


def _other_facts_on_1(rank: int, work: Path) -> None:
    from samestep.cluster.doctor import between_ranks

    announce = between_ranks.announce
    other = b'{"another": "samestep"}'
    if rank == 1:
        between_ranks.announce = lambda store, rank, _, wait_s: announce(store, rank, other, wait_s)


def _no_name_on_1(rank: int, work: Path) -> None:
    """Let rank 1 look for a master that is none, and the launcher end rank 0, which waits."""
    from samestep.cluster.doctor import between_ranks

    if rank == 1:
        os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    wait_for_all = between_ranks.wait_for_all

    def ask_and_wait(store, what, *more):
        if what == "rank":
            os.kill(os.getpid(), signal.SIGTERM)
        return wait_for_all(store, what, *more)

    between_ranks.wait_for_all = ask_and_wait


def _hangs_on_1(rank: int, work: Path) -> None:
    from samestep.cluster.doctor import between_ranks, measurements

    # On a busy machine ranks come seconds apart: only the hang is to run out of time.
    opened, waited = between_ranks.open_store, between_ranks.wait_for_all
    between_ranks.open_store = lambda launch, _: opened(launch, 60.0)
    between_ranks.wait_for_all = lambda store, what, ranks, *more: waited(
        store, what, ranks, *(60.0, *more[1:])[: len(more)]
    )
    between_ranks._ORDERS_MARGIN_S = 60.0
    if rank == 1:
        measurements.time_products = lambda _: threading.Event().wait()


def _killed_on_1(rank: int, work: Path) -> None:
    from samestep.cluster.doctor import measurements

    if rank == 1:
        measurements.time_products = lambda _: os.kill(os.getpid(), signal.SIGKILL)


PLANTS = {
    name.removeprefix("_"): value
    for name, value in globals().items()
    if name.startswith("_") and not name.startswith("__") and name != "_rank"
}


def table_of(ranks: Ranks) -> dict:
    assert "Traceback" not in ranks.output()
    return json.loads(ranks.printed(0)[ranks.printed(0).index("{") :])


def test_healthy_ranks_are_well_and_leave_nothing(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine.py").write_text("recipe = None")
    ranks = doctor(tmp_path, "", "mine.py", "--budget-s", "1", world_size=3)
    assert ranks.wait() == [0] * 3, ranks.output()
    table = table_of(ranks)
    assert reds(rows_in(table)) == set()
    assert rows_in(table)["recipe"]["status"] == "green"
    assert len(re.findall(r" [GM]B/s", rows_in(table)["links"]["found"])) == 2
    assert [rank["rank"] for rank in table["ranks"]] == [0, 1, 2]
    assert [size["bytes"] for size in table["all_reduce"]][:2] == [32, 1024]
    assert all(size["latency_us"] > 0 for size in table["all_reduce"])
    assert [ranks.printed(rank) for rank in (1, 2)] == ["", ""]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mine.py"]


# Who waits in vain is not kept waiting for long; who meets the others may be late to it.
IN_VAIN, MEETS = ("--timeout-s", "1"), ("--timeout-s", "4")
# plant: (exit codes, options, the red rows and their words, what rank 1 says itself)
DIFFERENCES = {
    "run directory": "runs",
    "same versions": "torch: 2.12.0",
    "same code": "bbbb",
    "recipe": "ranks 0, 1",
    "clock": "100.",
    "shared folder": "rank 1",
}
NO_NAME = "master address: no-such-host.invalid "
FAULTS = {
    "differs_on_1": ([1, 0], (*MEETS, "mine.py"), DIFFERENCES, ""),
    "other_facts_on_1": ([1, 0], MEETS, {"roll call": "rank 1 "}, ""),
    "no_name_on_1": ([1, 1], ("--timeout-s", "400"), {"roll call": "launcher"}, NO_NAME),
    "port_taken": ([1, 1], IN_VAIN, {"master port": "127.0.0.1"}, "Rank 0 "),
    "killed_on_1": ([1, -9], MEETS, {"connection": "rank 1"}, ""),
    "hangs_on_1": ([1, 1], ("--timeout-s", "3"), {"connection": "3.5 s"}, ""),
}


@pytest.mark.parametrize("plant", FAULTS)
def test_each_planted_fault_is_a_red_row_with_advice_and_nobody_hangs(tmp_path, plant):
    codes, options, words, said = FAULTS[plant]
    started = time.monotonic()
    ranks = doctor(tmp_path, plant, *options)
    assert ranks.wait() == codes, ranks.output()
    assert time.monotonic() - started < 200
    table = table_of(ranks)
    assert table["status"] == "red"
    rows = rows_in(table)
    assert reds(rows) == words.keys()
    assert all(words[name] in rows[name]["found"] for name in words), rows
    if said:  # by who cannot reach rank 0, in one line
        assert re.fullmatch(rf"samestep: \[rank 1 on \S+\] {re.escape(said)}.*\n", ranks.printed(1))
    else:
        assert ranks.printed(1) == ""


def run_here(capfd, *arguments: str) -> tuple[int | str | None, str]:
    from samestep.shell.commands.doctor import main

    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    return code, "".join(capfd.readouterr())


def test_one_process_alone_is_well_and_leaves_nothing(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, text = run_here(capfd, *QUICK)
    table = json.loads(text)
    assert code == 0
    assert table["status"] in ("green", "yellow")
    assert all(row.keys() == KEYS for row in table["checks"])
    assert {"python", "cores", "shared memory", "run directory"} <= rows_in(table).keys()
    assert (table["all_reduce"], len(table["ranks"])) == ([], 1)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_lost_contact_reports_an_effect_and_another_the_cause():
    failures = {0: "timing: Connection closed by peer", 1: "timing: out of memory"}
    finding = _lost(failures, 3)
    says(finding, "red: rank 1 lost at timing: out of memory; rank 2 sent nothing | NCCL_DEBUG")
    assert finding.name == "connection"


@pytest.mark.parametrize(
    ("variables", "words"),
    [({"RANK": "0"}, "LOCAL_RANK"), ({"RANK": "first", "LOCAL_RANK": "0"}, "RANK=first")],
)
def test_contradicting_variables_are_one_red_row(capfd, monkeypatch, variables, words):
    for name, value in (variables | {"WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    code, text = run_here(capfd, "--json")
    rows = rows_of(text)
    assert code == 1
    assert reds(rows) == {"launcher"} == rows.keys()
    assert words in rows["launcher"]["found"]
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    code, text = run_here(capfd)
    assert code == 1
    assert re.fullmatch(r"samestep: \[rank 2\] RANK=2 .*\n", text), "another rank's one line"


def test_a_device_that_is_not_here_is_a_red_row_and_the_rest_is_read(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, text = run_here(capfd, "--device", "cuda", "--json")
    assert code == 1
    assert reds(rows_of(text)) == {"device"}
    assert rows_of(text)["cores"]["found"]


@pytest.mark.parametrize(
    "mistake",
    [("--budget-s", "0"), ("--timeout-s", "-1"), ("--num-workers", "-2"), ("--what",), ("spiral",)],
)
def test_a_mistake_in_the_command_is_exit_code_2(capfd, mistake):
    code, text = run_here(capfd, *mistake)
    assert code == 2
    assert mistake[0] in text
    assert "Traceback" not in text
