"""How checks are run, named and merged; what the handbook says of each."""

import re
from pathlib import Path

import pytest

from samestep.doctor import addresses, node, run_directory, slurm_job
from samestep.doctor.diagnosis import SIDE_BY_SIDE
from samestep.doctor.findings import Finding, graded, green, merge, red, run_checks, worst, yellow

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "doctor.md"


def shared_memory(facts: int) -> Finding:
    return green(f"{facts} bytes")


def breaks(facts: int) -> Finding:
    raise KeyError(facts)


def has_nothing_to_look_at(facts: int) -> None:
    return None


def test_a_check_that_breaks_is_a_yellow_row_and_the_others_still_run():
    findings = run_checks([breaks, has_nothing_to_look_at, shared_memory], 7)
    assert [(f.name, f.status) for f in findings] == [
        ("breaks", "yellow"),
        ("shared memory", "green"),
    ]
    assert "KeyError: 7" in findings[0].found
    assert findings[1].found == "7 bytes"


def test_a_graded_finding_is_as_bad_as_its_worst_condition():
    assert graded("a", "b", red_if=True, yellow_if=True) == red("a", "b")
    assert graded("a", "b", yellow_if=True) == yellow("a", "b")
    assert graded("a", "b") == green("a")
    for make in (red, yellow):
        with pytest.raises(AssertionError):  # a problem without advice is a mistake of ours
            make("slow", "")


def test_the_worst_status_is_the_whole_tables():
    assert worst([]) == "green"
    assert worst([green("a"), yellow("b", "c"), green("d")]) == "yellow"
    assert worst([yellow("b", "c"), red("b", "c"), green("d")]) == "red"


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
def test_merging_keeps_the_worst_of_each_check_and_says_who_has_it_unless_all_have(
    of_ranks, merged
):
    assert merge([(f"rank {n}", found) for n, found in enumerate(of_ranks)]) == [merged]


CHECKS = (
    *(node.CHECKS, slurm_job.CHECKS, SIDE_BY_SIDE),
    *(run_directory.CHECKS, addresses.MEETING_CHECKS),
)


def test_every_row_stands_in_the_handbook():
    explained = set(re.findall(r"[a-z ]+", PAGE.read_text().split("| row |")[1].split("## ")[0]))
    names = {check.__name__.replace("_", " ") for checks in CHECKS for check in checks}
    assert names <= {words.strip() for words in explained}
