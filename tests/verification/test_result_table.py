"""What `samestep verify` shows: the table with its causes, and the same for programs."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from samestep.verification.causes import Cause
from samestep.verification.result_table import as_table, show
from samestep.verification.rows import judge
from samestep.verification.rows.loss import LossOfParts
from samestep.verification.verify_recipe import Verification
from tests.verification.made_up import undisturbed

GOLDEN = Path(__file__).with_name("table.txt")


def verification(evidence, **changes) -> Verification:
    """Return a verification of some evidence."""
    known = {"recipe": "spiral", "sizes": (1, 2), "facts": evidence.facts}
    more = {"precisions": ("fp64", "fp32"), "checks": judge(evidence), "seconds": 3.0, "notes": ()}
    return Verification(**{**known, **more, **changes})


def shown(found: Verification) -> list[str]:
    """Return the lines of the table."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(found, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def bent():
    """Return evidence of a loss that is a sum, with draws from torch."""
    found = {"loss": LossOfParts(0.5, 0.25, adds_up=True), "dropout": {"rand": "model.py:3"}}
    evidence = undisturbed(present=frozenset({"dropout"}), **found)
    evidence.traces[1, "main"][0].losses[2] += 0.3
    return evidence


def test_the_table_has_a_line_for_each_row_and_the_cause_of_several_once():
    assert shown(verification(bent(), notes=("On the CPU.",))) == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize(
    ("status", "rows", "words"),
    [
        ("accepted", ("dropout",), ["The same", "dropout"]),
        ("different", ("one writer",), ["The same", "every rank"]),
        ("different", ("2 ranks",), ["Not the same", "every rank"]),
    ],
)
def test_the_last_line_tells_another_training_from_what_is_accepted_or_written(status, rows, words):
    checks = [
        replace(check, status=status, cause=Cause("every rank writes", "x"))
        if check.name in rows
        else check
        for check in judge(undisturbed())
    ]
    last = shown(verification(undisturbed(), checks=checks))[-1]
    assert last.startswith(words[0])
    assert words[1] in last


def test_with_virtual_ranks_the_table_allows_nothing_and_says_so_in_its_last_line():
    evidence = undisturbed()
    facts = replace(evidence.facts, virtual_ranks=4)
    found = verification(replace(evidence, facts=facts), precisions=("fp32",))
    lines = shown(found)
    assert "4 virtual ranks on 1 and 2 ranks, fp32" in " ".join(" ".join(lines[1:3]).split())
    assert "allowed" not in " ".join(lines)
    assert "accepted" not in " ".join(lines)
    assert lines[-1] == "The same training, to the last bit. (3 s)"
    assert json.loads(json.dumps(as_table(found)))["virtual_ranks"] == 4


def test_json_has_every_row_and_no_infinity():
    checks = [replace(judge(undisturbed())[1], difference=math.inf)]
    found = json.loads(json.dumps(as_table(verification(undisturbed(), checks=checks))))
    assert {"same", "world_sizes", "precisions", "held_still", "notes", "seconds"} <= found.keys()
    assert {"name", "passed", "status", "first_step", "why", "advice"} <= found["checks"][0].keys()
    assert found["checks"][0]["difference"] is None
    assert found["checks"][0]["cause"] is None
    skipped = replace(checks[0], status="skipped")
    (row,) = as_table(verification(undisturbed(), checks=[skipped]))["checks"]
    assert row["passed"] is None
