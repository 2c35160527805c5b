"""How much is trained; differences between two trainings; the table of results."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from samestep.base.errors import UserError
from samestep.prove.verification import trace as traces
from samestep.prove.verification.causes import A_SUM, Cause
from samestep.prove.verification.few_samples import choose_training_size
from samestep.prove.verification.harness import Verification
from samestep.prove.verification.result_table import as_table, show
from samestep.prove.verification.rows import check_rows
from samestep.prove.verification.rows.loss import LossOfParts
from samestep.prove.verification.trace import Trace, Values, difference, evaluations_apart, relative
from tests.verification.made_up import undisturbed


def values(*numbers: float) -> Values:
    return np.array([np.linalg.norm(numbers), *numbers])


def trace(steps: int = 3, **more: Values) -> Trace:
    gradients = {"first": values(1.0, -2.0), "second": values(0.5), **more}
    return Trace(
        losses={step: 1.0 / step for step in range(1, steps + 1)},
        norms=dict.fromkeys(range(1, steps + 1), 2.0),
        gradients={step: dict(gradients) for step in range(1, steps + 1)},
        weights={step: dict(gradients) for step in range(1, steps + 1)},
    )


def test_the_first_step_and_parameter_that_differ_are_named_relative_to_their_size():
    assert relative(2.0, 1.0) == 0.5
    assert relative(0.0, 0.0) == relative(math.nan, math.nan) == 0.0
    assert relative(1.0, math.nan) == relative(1.0, math.inf) == math.inf
    assert relative(1e-20, -1e-20) < 1e-7
    one, other = {"loss": 1.0, "accuracy": 0.5}, {"loss": 1.0, "accuracy": 0.25}
    assert evaluations_apart(one, other) == (0.5, "accuracy")
    assert evaluations_apart({"loss": 1.0}, {})[0] == math.inf
    one, other = (trace(bad=values(math.inf, math.nan)) for _ in range(2))
    assert difference(one, other, 1e-9).largest == 0.0
    other.gradients[1]["bad"] = values(1.0, math.nan)
    assert difference(one, other, 1e-9).largest == math.inf
    assert difference(trace(2), trace(3), 1e-9).largest == math.inf
    assert difference(trace(), trace(third=values(1.0)), 1e-9).largest == math.inf
    other = trace()
    other.gradients[1]["first"] = values(9.0, 9.0)
    assert difference(trace(), other, 1e-9, losses_only=True).largest == 0.0
    other.losses[1] = 1.5
    found = difference(trace(), other, 1e-9, losses_only=True)
    assert found.largest == pytest.approx(1 / 3)
    assert found.first_parameter == "first"
    other.gradients[1]["first"] = trace().gradients[1]["first"]
    found = difference(trace(), other, 1e-9)
    assert (found.first_step, found.first_parameter, found.what) == (1, None, "loss")
    found = difference(trace(), trace(), 1e-12)
    assert (found.largest, found.first_step, found.first_parameter) == (0.0, None, None)
    resumed = trace()
    for table in (resumed.losses, resumed.norms, resumed.gradients, resumed.weights):
        del table[1]
    assert difference(trace(), resumed, 1e-12).largest == 0.0
    assert traces.worst([]).largest == 0.0
    other = trace()
    other.gradients[2]["second"] = values(0.5 + 1e-6)
    other.gradients[3]["first"] = values(5.0, -2.0)
    found = difference(trace(), other, 1e-9)
    assert (found.first_step, found.first_parameter, found.what) == (2, "second", "gradient")
    assert found.largest == pytest.approx(2.0)
    # A gradient counts relative to the largest of all, not to itself.
    tiny = trace(zero=values(1e-17))
    assert difference(tiny, trace(zero=values(-1e-17)), 1e-12).largest < 1e-16
    moved = trace(zero=values(-1e-17))
    moved.weights[2]["zero"] = values(0.1)  # as Adam does with it
    assert difference(tiny, moved, 1e-12).largest < 1e-16


SIZES = st.sets(st.integers(1, 9), min_size=1).map(lambda sizes: tuple(sorted({1, *sizes})))


@given(SIZES, st.booleans(), st.booleans(), st.integers(2, 100))
def test_the_batch_is_uneven_and_no_rank_without_samples(sizes, drop_last, heavy, asked):
    cut = choose_training_size(10_000, 1_000, sizes, drop_last=drop_last, heavy=heavy)
    several = [size for size in sizes if size > 1]
    assert cut.rest < cut.global_batch
    assert cut.num_samples == cut.full * cut.global_batch + cut.rest
    assert all(cut.rest % size for size in several)
    assert not several or any(cut.global_batch % size for size in several)
    assert cut.rest >= 2 * max(sizes) or max(sizes) == 1
    assert 0 < cut.stop < cut.steps
    assert all(cut.num_evaluated % size for size in several)
    assert choose_training_size(10_000, 10, sizes, batch=asked).global_batch == asked


@given(SIZES, st.integers(1, 60))
def test_few_samples_are_enough_or_refused_with_the_number_that_is_needed(sizes, num_samples):
    try:
        cut = choose_training_size(num_samples, 1, sizes)
    except UserError as error:
        needed = next(int(word) for word in re.split("ranks?: ", str(error))[1].split())
        assert needed > num_samples
        assert choose_training_size(needed, 1, sizes).num_samples == needed
    else:
        assert cut.num_samples <= num_samples


@pytest.mark.parametrize(
    ("samples", "sizes", "batch", "flags"),
    [
        (8, (1, 2, 3), None, ["--nproc 1,2."]),
        (4, (1, 2), None, ["--nproc 1."]),
        (2, (1,), None, []),
        (60, (1, 2), 100, ["--batch-size"]),
        (1, (1, 2), None, []),
        (5, (1, 2, 3), None, ["--nproc 1."]),
    ],
)
def test_the_message_has_the_samples_and_a_flag_that_leads_out(samples, sizes, batch, flags):
    with pytest.raises(UserError, match=rf"^{samples} ") as refused:
        choose_training_size(samples, 10, sizes, batch=batch)
    message = str(refused.value)
    assert re.findall(r"--\w[\w-]*(?: [\d,]+\.)?", message) == flags


GOLDEN = Path(__file__).with_name("table.txt")


def verification(evidence, **changes) -> Verification:
    known = {"recipe": "spiral", "sizes": (1, 2), "facts": evidence.facts}
    more = {
        "precisions": ("fp64", "fp32"),
        "checks": check_rows(evidence),
        "seconds": 3.0,
        "notes": (),
    }
    return Verification(**{**known, **more, **changes})


def shown(found: Verification) -> list[str]:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(found, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def bent():
    """Return evidence of a loss that is a sum, with draws from torch."""
    found = {"loss": LossOfParts(0.5, 0.25, A_SUM), "dropout": {"rand": "model.py:3"}}
    evidence = undisturbed(present=frozenset({"dropout"}), **found)
    evidence.traces[1, "main"][0].losses[2] += 0.3
    return evidence


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
        for check in check_rows(undisturbed())
    ]
    last = shown(verification(undisturbed(), checks=checks))[-1]
    assert last.startswith(words[0])
    assert words[1] in last
    loose = replace(checks[0], status="note", name="optimizer", tolerance=0.4)
    lines = shown(verification(undisturbed(), checks=[loose]))
    assert "rounding hides differences below 0.4" in " ".join(lines)


def test_the_table_and_json_have_every_row_and_the_cause_of_several_once():
    checks = [replace(check_rows(undisturbed())[1], difference=math.inf)]
    found = json.loads(json.dumps(as_table(verification(undisturbed(), checks=checks))))
    assert {"same", "world_sizes", "precisions", "held_still", "notes", "seconds"} <= found.keys()
    assert {"name", "passed", "status", "first_step", "why", "advice"} <= found["checks"][0].keys()
    assert found["checks"][0]["difference"] is None
    assert found["checks"][0]["cause"] is None
    skipped = replace(checks[0], status="skipped")
    (row,) = as_table(verification(undisturbed(), checks=[skipped]))["checks"]
    assert row["passed"] is None
    evidence = undisturbed()
    facts = replace(evidence.facts, virtual_ranks=4)
    found = verification(replace(evidence, facts=facts), precisions=("fp32",))
    lines = shown(found)
    assert "4 virtual ranks on 1 and 2 ranks, fp32" in " ".join(" ".join(lines[1:3]).split())
    assert "allowed" not in " ".join(lines)
    assert "accepted" not in " ".join(lines)
    assert lines[-1] == "The same training, to the last bit. (3 s)"
    assert json.loads(json.dumps(as_table(found)))["virtual_ranks"] == 4
    assert shown(verification(bent(), notes=("On the CPU.",))) == GOLDEN.read_text().splitlines()
