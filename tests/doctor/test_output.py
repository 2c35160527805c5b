"""What is shown: a table that fits a terminal, an object for programs."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from samestep.doctor.diagnosis import Diagnosis, print_report
from samestep.doctor.findings import green, red, yellow
from samestep.doctor.measurements import MEASURED_ROUNDS, bus_bandwidth, rounds_within
from tests.doctor.situations import MEASURED, four


def printed(diagnosis: Diagnosis, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_report(diagnosis, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


DIAGNOSIS = Diagnosis(
    findings=(
        green("2 of 2", name="cores"),
        yellow("little of it", "Give the container more of it. " * 4, "shared memory"),
        red("node1 [does] not resolve", "Set MASTER_ADDR. " * 6, "master address"),
    ),
    all_reduce=MEASURED.all_reduce,
    ranks=tuple(four()),
)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_says_all_and_the_worst_comes_last(width):
    lines = printed(DIAGNOSIS, width)
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["green", "cores", "2", "of", "2"]
    assert any("node1 [does] not resolve" in line for line in lines)
    assert any(line.lstrip().startswith("→ Set MASTER_ADDR.") for line in lines)
    assert any(line.split() == ["256", "MiB", "20,000", "10.0000"] for line in lines)
    assert lines[-1] == "1 red: master address"
    healthy = Diagnosis(findings=(green("2 of 2", name="cores"), green("fine", name="torch")))
    assert "2 checks" in printed(healthy, width)[-1]


@pytest.mark.parametrize("width", [60, 80])
def test_a_path_and_an_address_are_never_cut(width):
    path, address = "/a/folder" * 9, "https://pytorch.org/docs/stable/elastic/run.html"
    finding = yellow(f"little of it in {path}", f"See {address} for more.", "shared memory")
    lines = printed(replace(DIAGNOSIS, findings=(finding,)), width)
    assert any(path in line for line in lines)
    assert any(address in line for line in lines)


def test_the_object_for_programs_holds_the_same():
    table = json.loads(DIAGNOSIS.as_json())
    assert table["status"] == "red"
    assert [row["status"] for row in table["checks"]] == ["green", "yellow", "red"]
    assert table["all_reduce"][0] == {"bytes": 32, "latency_us": 40.0, "bus_gb_s": 0.001}
    assert [rank["host"] for rank in table["ranks"]] == ["node1", "node1", "node2", "node2"]


def test_bus_bandwidth_is_that_of_nccl_tests():
    # doc/PERFORMANCE.md: for all-reduce, bus bandwidth = algorithm bandwidth × 2 (n - 1) / n.
    assert bus_bandwidth(10**9, 1.0, 2) == 1.0
    assert bus_bandwidth(10**9, 1.0, 8) == 1.75
    assert bus_bandwidth(10**9, 0.5, 4) == 3.0


def test_a_size_is_timed_as_often_as_there_is_time_and_not_begun_where_there_is_none():
    rounds = {(0.0, 20.0): MEASURED_ROUNDS, (0.25, 20.0): 3, (5.0, 10.1): 1, (5.0, 9.9): 0}
    assert {times: rounds_within(*times) for times in rounds} == rounds
    assert rounds_within(0.0, -1.0) == 0
