"""Findings and what is shown of them: a table that fits a terminal, an object for programs."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from samestep.cluster.doctor import addresses, node, run_directory, slurm_job
from samestep.cluster.doctor.diagnosis import SIDE_BY_SIDE, Diagnosis, print_report
from samestep.cluster.doctor.findings import (
    Finding,
    graded,
    green,
    merge,
    red,
    run_checks,
    worst,
    yellow,
)
from samestep.cluster.doctor.measurements import MEASURED_ROUNDS, bus_bandwidth, rounds_within
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


def test_the_object_for_programs_holds_the_same_and_the_handbook_every_row():
    table = json.loads(DIAGNOSIS.as_json())
    assert table["status"] == "red"
    assert [row["status"] for row in table["checks"]] == ["green", "yellow", "red"]
    assert table["all_reduce"][0] == {"bytes": 32, "latency_us": 40.0, "bus_gb_s": 0.001}
    assert [rank["host"] for rank in table["ranks"]] == ["node1", "node1", "node2", "node2"]
    explained = set(re.findall(r"[a-z ]+", PAGE.read_text().split("| row |")[1].split("## ")[0]))
    names = {check.__name__.replace("_", " ") for checks in CHECKS for check in checks}
    assert names <= {words.strip() for words in explained}


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "doctor.md"


def shared_memory(facts: int) -> Finding:
    return green(f"{facts} bytes")


def breaks(facts: int) -> Finding:
    raise KeyError(facts)


def test_a_check_that_breaks_is_yellow_and_bandwidth_that_of_nccl_tests():
    findings = run_checks([breaks, lambda _nothing_to_look_at: None, shared_memory], 7)
    assert [(f.name, f.status) for f in findings] == [
        ("breaks", "yellow"),
        ("shared memory", "green"),
    ]
    assert "KeyError: 7" in findings[0].found
    assert findings[1].found == "7 bytes"
    assert graded("a", "b", red_if=True, yellow_if=True) == red("a", "b")
    assert graded("a", "b", yellow_if=True) == yellow("a", "b")
    assert graded("a", "b") == green("a")
    for make in (red, yellow):
        with pytest.raises(AssertionError):  # a problem without advice is a mistake of ours
            make("slow", "")
    assert worst([]) == "green"
    assert worst([green("a"), yellow("b", "c"), green("d")]) == "yellow"
    assert worst([yellow("b", "c"), red("b", "c"), green("d")]) == "red"
    # doc/PERFORMANCE.md: for all-reduce, bus bandwidth = algorithm bandwidth × 2 (n - 1) / n.
    assert bus_bandwidth(10**9, 1.0, 2) == 1.0
    assert bus_bandwidth(10**9, 1.0, 8) == 1.75
    assert bus_bandwidth(10**9, 0.5, 4) == 3.0
    rounds = {(0.0, 20.0): MEASURED_ROUNDS, (0.25, 20.0): 3, (5.0, 10.1): 1, (5.0, 9.9): 0}
    assert {times: rounds_within(*times) for times in rounds} == rounds
    assert rounds_within(0.0, -1.0) == 0


SLOW, FULL = yellow("slow", "wait", "disk"), red("full", "empty it", "disk")
FINE = green("fine", name="disk")


@pytest.mark.parametrize(
    ("of_ranks", "merged"),
    [
        ([[FINE], [FULL], [FULL]], Finding("red", "rank 1 and 1 more: full", "empty it", "disk")),
        ([[SLOW], [SLOW]], SLOW),
        ([[FINE], [FINE]], FINE),
        ([[SLOW], []], SLOW),
    ],
    ids=["the worst", "all the same", "all are well", "only one looked"],
)
def test_merging_keeps_the_worst_of_each_check_and_says_who_has_it(of_ranks, merged):
    assert merge([(f"rank {n}", found) for n, found in enumerate(of_ranks)]) == [merged]


CHECKS = (
    *(node.CHECKS, slurm_job.CHECKS, SIDE_BY_SIDE),
    *(run_directory.CHECKS, addresses.MEETING_CHECKS),
)
