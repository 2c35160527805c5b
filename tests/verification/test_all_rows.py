"""The rows of the table on made-up evidence: what they call the same, and the cause they name."""

import copy
import math
import re
from dataclasses import replace

import pytest
import torch

from samestep.prove.verification import causes, short_trainings
from samestep.prove.verification.rows import one_writer, plan_trainings
from samestep.prove.verification.rows import state as state_row
from samestep.prove.verification.rows.data import Changes
from samestep.prove.verification.rows.loss import LossOfParts
from samestep.prove.verification.rows.model import BatchInfluence
from samestep.prove.verification.rows.one_writer import RecipeOutput
from samestep.prove.verification.rows.state import ModuleCall, ModuleDifference, first_at_fault
from samestep.prove.verification.rows.trainings import Arithmetic
from samestep.prove.verification.short_trainings import (
    MAIN,
    NUDGED,
    NUDGED_GRADIENT,
    NUDGED_IN_OWN,
    OWN_PRECISION,
    RankFailure,
)
from tests.verification.made_up import checks, computed, different, kept_call, undisturbed

SUM = LossOfParts(0.5, 0.25, causes.A_SUM)
MODULE = ModuleDifference("1", 0.5)
OUTSIDE = state_row.OutsideState()
REMEMBERS, MIXED = replace(OUTSIDE, remembers=MODULE), BatchInfluence(MODULE)
DRAWS = replace(OUTSIDE, generators=["Python's random"])


def copied(evidence):
    return copy.deepcopy(dict(evidence.traces))


def losses_apart(evidence, training=MAIN, place=1):
    traces = copied(evidence)
    traces[place, training][0].losses[2] += 0.3
    return replace(evidence, traces=traces)


BROKE = "RuntimeError: it broke (model.py:3)"


def failing(evidence, training, *, step=1, message=BROKE, place=1, mistake=False):
    reports = copy.deepcopy(evidence.reports)
    told = RankFailure(training=training, step=step, message=message, mistake=mistake)
    reports[place][-1].failures.append(told)
    reports[place][0].failures.append(
        RankFailure(training=training, step=step, message="Connection closed", lost_peer=True)
    )
    traces = {key: found for key, found in evidence.traces.items() if key != (place, training)}
    return replace(evidence, reports=reports, traces=traces, ended={place: message})


def on_rank(evidence, row, *found, place=1):
    reports = copy.deepcopy(evidence.reports)
    for report, value in zip(reports[place], found, strict=False):
        report.results[row] = value
    return replace(evidence, reports=reports)


def test_an_undisturbed_training_is_the_same_in_every_row_and_all_ranks_may_differ():
    found = checks(undisturbed((1, 2, 3)))
    assert {check.status for check in found.values()} == {"same"}
    assert list(found) == [
        *("one process", "2 ranks", "3 ranks", "fp32", "accumulation", "stop and resume"),
        *("fsdp", "lightning", "BatchNorm", "dropout", "order", "processes", "augmentation"),
        *("loss", "last batch", "parameters", "state", "samples apart", "evaluation", "metrics"),
        *("one writer", "one device"),
    ]
    assert found["stop and resume"].compared.endswith(": ranks 1→2, 2→3, 3→1")
    times_two = [*computed().calls[:2], kept_call("the loss", [4.0], [1.0])]
    evidence = undisturbed(state=replace(OUTSIDE, asks={"get_world_size()": "a.py:3"}))
    evidence = on_rank(evidence, "processes", *[computed(calls=times_two)] * 2)
    quick = replace(evidence, reports={k: v for k, v in evidence.reports.items() if k < 2})
    assert different(quick) == {"processes": causes.FORWARD_BY_RANK.name}
    assert "get_world_size() in a.py:3" in checks(quick)["processes"].cause.why
    found = checks(undisturbed((1,)))
    assert found["stop and resume"].compared.endswith(": rank 1→1")
    skipped = {name for name, check in found.items() if check.status == "skipped"}
    assert skipped == {"fsdp", "order", "evaluation", "metrics", "one writer", "one device"}


@pytest.mark.parametrize(("moves", "allowed"), [(1e-9, 1e-5), (1e-5, 3e-4), (0.1, 1e-2)])
def test_without_float64_the_measure_is_what_one_rounding_of_the_weights_moves(moves, allowed):
    evidence = undisturbed()
    evidence = replace(evidence, facts=replace(evidence.facts, exact="fp32"))
    assert "rounding" not in checks(evidence)
    traces = dict(evidence.traces)
    traces[0, NUDGED] = copy.deepcopy(traces[0, MAIN])
    traces[0, NUDGED][0].losses[1] *= 1 - moves
    found = checks(replace(evidence, traces=traces))
    assert found["rounding"].difference == pytest.approx(moves)
    assert found["2 ranks"].tolerance == found["rounding"].tolerance == pytest.approx(allowed)


@pytest.mark.parametrize(
    ("hidden", "cause", "status"),
    [
        ({"optimizer": ["the optimizer's moved"]}, causes.OPTIMIZER.name, "note"),
        ({"kept": ["the model's calls"]}, causes.OUTSIDE_MODULE.name, "note"),
        ({"learned": ["the loss's scale"]}, causes.LEARNED.name, "note"),
        ({"draws": ["torch (a.py:3)"]}, causes.DRAWS.name, "same"),
        ({"asks": {"time.time()": "a.py:3"}}, causes.UNKNOWN.name, "same"),
    ],
)
def test_what_is_hidden_explains_the_rest_and_is_no_difference_itself(hidden, cause, status):
    evidence = undisturbed(state=replace(OUTSIDE, **hidden))
    assert different(evidence) == {}
    assert checks(evidence)["state"].status == status
    assert different(losses_apart(evidence, "resumed")) == {"stop and resume": cause}
    known = undisturbed(state=replace(OUTSIDE, **hidden), loss=SUM)
    assert different(losses_apart(known))["2 ranks"] == causes.NOT_A_MEAN.name


@pytest.mark.parametrize(
    ("row", "found", "cause"),
    [
        ("augmentation", Changes("augment", batchwise=False), causes.UNKEYED["augment"].name),
        ("loss", SUM, causes.NOT_A_MEAN.name),
        ("loss", LossOfParts(0.0, 0.5), causes.UNEVEN_BATCH.name),
        ("state", REMEMBERS, causes.OUTSIDE_MODULE.name),
        ("state", replace(OUTSIDE, loss=0.25), causes.IN_LOSS.name),
        ("samples apart", MIXED, causes.MIXED.name),
        ("samples apart", BatchInfluence(None, ["mean"]), causes.BUFFERS.name),
        ("metrics", {}, causes.UNKNOWN.name),
    ],
)
def test_a_difference_of_training_has_the_cause_that_the_experiments_found(row, found, cause):
    evidence = losses_apart(undisturbed(**{row.replace(" ", "_"): found}))
    check = checks(evidence)["2 ranks"]
    assert (check.status, check.first_step, check.cause.name) == ("different", 2, cause)
    assert check.difference == pytest.approx(0.3 / 0.8)


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        ({"loss": SUM}, {"loss": causes.NOT_A_MEAN.name}),
        ({"parameters": ["spare.bias"]}, {"parameters": causes.UNUSED.name}),
        # A module that remembers explains both rows,
        ({"state": REMEMBERS, "samples_apart": MIXED}, {"state": causes.OUTSIDE_MODULE.name}),
        # and a loss with a state explains that it adds up to another number.
        ({"state": replace(OUTSIDE, loss=0.25), "loss": SUM}, {"state": causes.IN_LOSS.name}),
        # F1 is 0 on every rank as long as no sample is predicted to be positive.
        ({"metrics": {"f1": 0.25}}, {"metrics": causes.OVER_RANKS.name}),
    ],
)
def test_a_cause_without_a_difference_is_named_by_its_own_row_alone(found, rows):
    assert different(undisturbed(**found)) == rows


def test_what_is_allowed_or_tolerated_is_told_as_a_note():
    found = undisturbed(parameters=["spare.bias"])
    found = replace(found, facts=replace(found.facts, allows_unused=True))
    assert checks(found)["parameters"].status == "same"
    found = replace(undisturbed(metrics={"f1": 0.25}), tolerance=0.1)
    assert checks(found)["metrics"].status == "note"
    found = undisturbed(state=replace(OUTSIDE, own_generators=["model.py:3"]))
    found = replace(found, accepts=frozenset({"dropout", "batchnorm"}))
    assert different(found) == {"state": causes.OUTSIDE_MODULE.name}
    assert "model.py:3" in checks(found)["state"].cause.why
    evidence = losses_apart(undisturbed(loss=SUM))
    assert set(different(evidence)) == {"2 ranks", "loss"}
    found = checks(replace(evidence, tolerance=0.9))
    assert found["loss"].status == "note"
    assert (found["2 ranks"].status, found["2 ranks"].tolerance) == ("same", 0.9)
    assert set(different(replace(evidence, tolerance=1e-6))) == {"2 ranks"}
    # Other weights at the end are a difference even where losses decide.
    evidence = undisturbed()
    last = evidence.traces[1, MAIN][1].weights[evidence.facts.size.steps]
    last["first.weight"] += 100.0
    evidence = replace(evidence, tolerance=0.5)
    assert list(different(evidence)) == ["2 ranks"]
    assert checks(evidence)["2 ranks"].first_parameter == "first.weight"


@pytest.mark.parametrize(
    ("training", "row"),
    [
        (OWN_PRECISION, "fp32"),
        ("accumulated", "accumulation"),
        ("resumed", "stop and resume"),
        ("fsdp", "fsdp"),
        ("lightning", "lightning"),
    ],
)
def test_each_short_training_decides_its_own_row(training, row):
    assert different(losses_apart(undisturbed(), training)) == {row: causes.UNKNOWN.name}
    assert different(failing(undisturbed(), training)) == {row: None}


@pytest.mark.parametrize(
    ("kind", "row", "found", "cause"),
    [
        ("batchnorm", "BatchNorm", ["1"], causes.BATCHNORM.name),
        ("dropout", "dropout", {"rand": "model.py:3"}, causes.DROPOUT.name),
        ("state", "state", DRAWS, causes.OUTSIDE_MODULE.name),
    ],
)
def test_what_differs_by_itself_is_measured_alone_and_may_be_accepted(kind, row, found, cause):
    evidence = undisturbed(present=frozenset({kind}), **{row: found})
    assert checks(evidence)[row].status == "same"
    evidence = losses_apart(evidence, f"{kind} as it is")
    assert different(evidence) == {row: cause}
    accepted = checks(replace(evidence, accepts=frozenset({kind})))[row]
    assert accepted.status == ("different" if kind == "state" else "accepted")
    assert accepted.cause.name == cause
    assert different(replace(evidence, accepts=frozenset({"dropout", "batchnorm"} - {kind}))) == {
        row: cause
    }


def test_what_an_optimizer_makes_of_a_rounding_is_allowed_and_a_count_explains_micro_steps():
    narrow = Arithmetic(wide=False, kind="bfloat16", unit=2.0**-8)
    evidence = undisturbed(optimizer=narrow, **{NUDGED_IN_OWN: narrow})
    nudged = copied(evidence)
    nudged[0, NUDGED_IN_OWN] = copy.deepcopy(nudged[0, OWN_PRECISION])
    nudged[0, NUDGED_IN_OWN][0].losses[2] *= 1 - 0.02
    nudged[0, NUDGED_GRADIENT][0].weights[1]["first.weight"][1] += 0.004
    for step, same in ((1, False), (2, True)):
        traces = copy.deepcopy(nudged)
        traces[1, MAIN][0].gradients[step]["first.weight"][1] += 0.004
        found = checks(replace(evidence, traces=traces))
        assert found["2 ranks"].passed is same
        assert found["2 ranks"].tolerance == pytest.approx(0.004 if same else 1e-10)
    assert found["fp32"].tolerance == pytest.approx(0.08)
    assert found["optimizer"].status == "note"
    assert "bfloat16" in found["optimizer"].cause.why
    assert "optimizer" not in checks(evidence)
    moved = undisturbed(samples_apart=BatchInfluence(None, [], ["first.weight_u"]))
    assert different(moved) == {}
    evidence = losses_apart(moved, "accumulated")
    assert different(evidence) == {"accumulation": causes.MOVED_BUFFER.name}
    assert "first.weight_u" in checks(evidence)["accumulation"].cause.why
    both = losses_apart(evidence)
    assert different(both) == dict.fromkeys(("2 ranks", "accumulation"), causes.UNKNOWN.name)
    counted = replace(OUTSIDE, counted=["the model's steps"])
    evidence = losses_apart(undisturbed(state=counted), "accumulated")
    assert different(evidence) == {"accumulation": causes.MOVED_BUFFER.name}
    assert checks(evidence)["state"].status == "same"


@pytest.mark.parametrize(
    ("training", "place", "mistake"), [("fsdp", 1, True), ("lightning", 0, False)]
)
def test_what_cannot_be_trained_at_all_says_nothing_of_the_training(training, place, mistake):
    """FSDP refuses before the first step, and Lightning in one process."""
    evidence = failing(undisturbed(), training, place=place, message="tied", mistake=mistake)
    found = checks(replace(evidence, ended={}))[training]
    assert found.status == "skipped"
    assert "tied" in found.compared


def test_other_shares_lengths_and_samples_are_named_with_step_and_ranks():
    evidence = undisturbed()
    evidence.traces[1, MAIN][1].samples[3].reverse()
    evidence.traces[1, MAIN][1].evaluated.append("0")
    assert list(different(evidence)) == ["order", "evaluation"]
    found = checks(evidence)["order"]
    assert (found.cause.name, found.first_step) == ("order", 3)
    evidence = undisturbed()
    reports = copy.deepcopy(evidence.reports)
    reports[1][1].num_samples = 59
    found = checks(replace(evidence, reports=reports))["order"]
    assert found.cause.name == causes.LENGTHS.name
    assert re.findall(r"rank \d of \d holds \d+", found.cause.why) == [
        "rank 0 of 2 holds 60",
        "rank 1 of 2 holds 59",
    ]
    evidence = losses_apart(undisturbed())
    both = dict.fromkeys(("2 ranks", "order"), causes.OTHER_ORDER.name)
    assert different(on_rank(evidence, "order", ["b", "a"])) == both
    evidence = on_rank(undisturbed(), "order", ["a", "b"], ["c", "d"])
    assert different(evidence) == {"order": causes.DATA_BY_RANK.name}
    assert "rank 1 of 2" in checks(evidence)["order"].cause.why


def test_a_metric_is_told_from_a_loss_and_may_be_no_number():
    evidence = undisturbed()
    evidence.traces[1, MAIN][0].evaluations[0]["accuracy"] = 0.25
    assert different(evidence) == {"metrics": causes.UNKNOWN.name}
    across = on_rank(evidence, "metrics", {"accuracy": 0.25})
    assert different(across) == {"metrics": causes.OVER_RANKS.name}
    evidence = undisturbed()
    evidence.traces[1, MAIN][0].evaluations[evidence.facts.size.stop]["accuracy"] = 0.25
    found = checks(evidence)["metrics"]
    assert (found.status, found.first_step) == ("different", evidence.facts.size.stop)
    assert "metrics" not in different(losses_apart(evidence))
    evidence = undisturbed(metrics={"accuracy": math.nan})
    assert different(on_rank(evidence, "metrics", {"accuracy": math.nan})) == {}
    nothing = {"loss": 0.7, "accuracy": math.nan}
    assert different(on_rank(evidence, "one device", nothing, place=2)) == {
        "one device": causes.UNKNOWN.name
    }
    evidence = undisturbed()
    other = on_rank(evidence, "one device", {"loss": 0.7, "accuracy": 0.4}, place=2)
    assert different(other) == {"one device": causes.UNKNOWN.name}
    none = on_rank(evidence, "one device", {}, place=2)
    assert checks(none)["one device"].status == "skipped"


def test_initial_weights_are_named_and_a_module_not_blamed_for_its_input():
    other = computed(weights={"first.weight": torch.tensor([5.0, 4.0, 3.0])})
    evidence = on_rank(undisturbed(), "processes", computed(), other)
    assert different(evidence) == {"processes": causes.INITIAL_WEIGHTS.name}
    why = checks(evidence)["processes"].cause.why
    assert "first.weight" in why
    assert "rank 1 of 2" in why
    assert different(losses_apart(evidence))["2 ranks"] == causes.INITIAL_WEIGHTS.name
    written = undisturbed(samples_apart=BatchInfluence(written=["scale"]))
    evidence = failing(written, MAIN, step=2, message="The weights have drifted apart: scale")
    assert checks(evidence)["2 ranks"].cause.name == causes.WRITTEN.name
    one, two = torch.ones(2, 3), torch.ones(2, 3) * 2

    def calls(white, out):
        inner = [("a", one, one), ("block.b", white, out), ("block", white, out), ("", one, out)]
        return [ModuleCall(name, [given], [made]) for name, given, made in inner]

    found = first_at_fault(calls(one, one), calls(two, two), 1e-10, "Net")
    assert (found.module, found.before) == ("Net", "block.b")
    inside = [("block.a", one, one), ("block.b", two, two), ("block", one, two), ("", one, two)]
    inside = [ModuleCall(name, [given], [made]) for name, given, made in inside]
    same = [ModuleCall(call.name, [one], [one]) for call in inside]
    assert first_at_fault(same, inside, 1e-10, "Net")[0] == "block"


FORWARD = [kept_call("first", [1.0, 2.0], [3.0]), kept_call("", [1.0, 2.0], [4.5])]
LOSS = [*computed().calls[:2], kept_call("the loss", [4.0], [0.7])]


@pytest.mark.parametrize(("calls", "named"), [(FORWARD, "Net"), (LOSS, "the loss")])
def test_what_a_rank_computes_otherwise_is_named_with_the_module(calls, named):
    evidence = on_rank(
        undisturbed(), "processes", computed(), computed(calls=[*calls, LOSS[2]][:3])
    )
    assert different(evidence) == {"processes": causes.FORWARD_BY_RANK.name}
    why = checks(evidence)["processes"].cause.why
    assert why.startswith(f"{named} returns different values in rank 1 of 2 ")
    other_samples = computed(calls=[*calls, LOSS[2]][:3], samples=["c", "d"])
    assert different(on_rank(undisturbed(), "processes", computed(), other_samples)) == {}
    remembers = undisturbed(state=REMEMBERS)
    changed = on_rank(remembers, "processes", computed(), computed(calls=calls))
    assert set(different(changed)) == {"state"}


def test_quick_leaves_rows_out_and_what_is_unknown_is_told_once():
    evidence = undisturbed()
    facts, start = evidence.facts, evidence.starts[1]
    assert [t.name for t in plan_trainings(start, facts, "fp32", quick=True)] == [MAIN]
    assert not any(start.closing for start in short_trainings.plan_starts((1, 2), quick=True))
    found = checks(replace(evidence, quick=True))
    left_out = {name for name, check in found.items() if check.status == "skipped"}
    trainings = {"precision", "accumulation", "stop and resume", "fsdp", "lightning"}
    assert left_out == trainings | {"a rank dies", "one device"}
    killed = short_trainings.start_with_death((1, 2), 3)
    assert [t.name for t in plan_trainings(killed, facts, "fp32")] == ["a rank dies"]
    facts = undisturbed(present=frozenset({"dropout", "state"})).facts
    starts = undisturbed().starts
    assert [t.name for t in plan_trainings(starts[1], facts, "fp32")] == [
        *(MAIN, "dropout as it is", "state as it is", "accumulated", "resumed"),
        *(OWN_PRECISION, "lightning", "fsdp"),
    ]
    assert [t.name for t in plan_trainings(starts[-1], facts, "fp32")] == ["resumed"]
    assert OWN_PRECISION not in [t.name for t in plan_trainings(starts[0], facts, "fp64")]
    evidence = losses_apart(losses_apart(undisturbed()), "accumulated")
    evidence.traces[1, "accumulated"][0].losses[1] += 0.3
    found = checks(evidence)
    rows = [check for check in found.values() if not check.passed]
    assert {check.name for check in rows} == {"2 ranks", "accumulation"}
    (cause,) = {check.cause for check in rows}
    assert cause.name == causes.UNKNOWN.name
    assert "step 1" in cause.why


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("finished reduction in the prior iteration", causes.UNUSED.name),
        ("The ranks loaded data of different sizes", "order"),
        ("RuntimeError: it broke", None),
    ],
)
def test_a_failure_has_the_cause_that_its_message_tells(message, cause):
    found = checks(failing(undisturbed(), MAIN, message=message))["2 ranks"]
    assert (found.status, found.cause.name) == ("different", cause)
    assert message in found.cause.why


def test_a_failure_fails_its_row_and_a_file_of_two_ranks_differs():
    evidence = undisturbed()
    step = evidence.facts.size.uneven_step
    found = checks(failing(evidence, MAIN, step=step))["2 ranks"]
    assert (found.first_step, found.cause.name) == (step, causes.UNEVEN_BATCH.name)
    said = failing(evidence, MAIN, step=step, message="find_unused_parameters=True")
    assert checks(said)["2 ranks"].cause.name == causes.UNUSED.name
    evidence = failing(undisturbed(), MAIN, place=0)
    (found,) = checks(evidence).values()
    assert (found.name, found.status) == ("one process", "different")
    evidence = undisturbed()
    traces = {key: found for key, found in evidence.traces.items() if key != (1, MAIN)}
    found = checks(replace(evidence, traces=traces, ended={1: "rank 1 was killed by SIGKILL"}))
    assert found["2 ranks"].status == "different"
    assert "SIGKILL" in found["2 ranks"].cause.why
    assert found["one process"].passed
    outputs = [RecipeOutput({"a.py:1": "hello"}, {f"/x/{k}": "a.py:2"}) for k in "ab"]
    found = checks(on_rank(undisturbed(), one_writer.ONE_WRITER.name, *outputs))["one writer"]
    assert found.status == "note"
    assert "a.py:1" in found.cause.why
    assert "'hello'" in found.cause.why
    files = {"/x/a": "a.py:2", "/x/b": "a.py:3"}
    both = on_rank(undisturbed(), one_writer.ONE_WRITER.name, *[RecipeOutput(written=files)] * 2)
    assert different(both) == {"one writer": "every rank writes"}
    why = checks(both)["one writer"].cause.why
    assert "a.py:2 writes /x/a and 1 more file " in why


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"last_batch": {}}, "same"),
        ({"last_batch": {1: "ValueError: one"}}, "note"),
        ({"last_batch": {5: "x"}}, "different"),
        ({"loss": LossOfParts(0.5, 0.5)}, "skipped"),  # bent in full batches, too
    ],
)
def test_the_last_batch_fails_alone_or_with_one_sample_alone(found, status):
    evidence = undisturbed(**found)
    assert evidence.facts.size.rest == 5
    assert checks(evidence)["last batch"].status == status
