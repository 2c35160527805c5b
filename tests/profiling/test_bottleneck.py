"""The verdict is a function of measured numbers, and finds bottlenecks that were planted."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from samestep.base.table import text_lines
from samestep.scripts.measuring import bottleneck
from samestep.scripts.measuring.bottleneck import ADVICE, StepPart, diagnose, milliseconds
from samestep.scripts.measuring.measured import MeasuredRank, MeasuredSteps, Operations
from samestep.scripts.measuring.profile_report import Profile, Sweep, SweepRow, show, sweep_table
from tests.command_line import start
from tests.profiling.planted import SITUATIONS, read

STEP = dict.fromkeys(("data", "other"), 0.001) | dict.fromkeys(("to_device", "all_reduce"), 0.0)
STEP |= {"forward": 0.02, "backward": 0.04, "optimizer": 0.01}


def measured(*ranks, operations=None, **told):
    phases = [{**STEP, **rank} for rank in ranks or [{}]]
    found = tuple(MeasuredRank(phases=one, operations=operations) for one in phases)
    return MeasuredSteps(**{"ranks": found, "steps": 100, "cores": 8, **told})


def operations(**shares):
    return Operations(**{"matmul": 1.0 - sum(shares.values()), **shares}, count=500)


DATA, SLOW_DATA = {"data": 0.3}, Operations(matmul=1.0, collate=0.6)
REDUCE = ({"all_reduce": 0.2},) * 2
TAKE_TURNS = {"all_reduce": 0.1, "forward": 0.022}, {"all_reduce": 0.1}  # at being the last
LATE = {"data": 0.301}, {"all_reduce": 0.3}, {"all_reduce": 0.3}
VERDICTS = [
    ("input-bound", measured(DATA), "--workers"),
    ("input-bound", measured(DATA, script=True), "num_workers="),
    ("input-bound", measured(DATA, script=True, iterable=True), "get_worker_info"),
    ("input-bound", measured(DATA, in_memory=True), "transform"),
    ("input-bound", measured(DATA, workers=8), "cheaper"),
    ("input-bound", measured(DATA, workers=2, worker_start=0.2), "persistent_workers"),
    ("input-bound", measured(DATA, operations=SLOW_DATA), "60%"),
    ("input-bound", measured(DATA, workers=1), "1 worker"),
    ("transfer-bound", measured({"to_device": 0.3}), "transform"),
    ("transfer-bound", measured({"to_device": 0.3}, script=True), "pin"),
    ("compute-bound", measured(operations=operations()), "device"),
    ("untraced", measured(), "trace"),
    ("launch-bound", measured(operations=operations(launch=0.8)), "--compile on"),
    ("launch-bound", measured(operations=operations(launch=0.8), script=True), "torch.compile"),
    ("launch-bound", measured(operations=operations(launch=0.8), compiled=True), "--batch-size"),
    ("memory-bound", measured(operations=operations(memory=0.8)), "fuse"),
    ("memory-bound", measured(operations=operations(memory=0.8), compiled=True), "bf16"),
    ("memory-bound", measured({"optimizer": 0.3}, operations=operations(memory=0.8)), "optimizer"),
    ("host-sync", measured(operations=operations(sync=0.8), device="cuda"), "tensors"),
    ("evaluation-bound", measured(evaluation=0.2), "--eval-every"),
    ("checkpoint-bound", measured(checkpoint=0.2), "--checkpoint-every"),
    ("checkpoint-bound", measured(checkpoint=0.2, counts={"checkpoint": 4}), "224 steps"),
    ("loop-bound", measured({"other": 0.3}), "--log-every"),
    ("loop-bound", measured({"other": 0.3}, script=True, in_memory=True), "making batches"),
    ("communication-bound", measured(*REDUCE, gradient_bytes=1 << 30), "--accumulate"),
    ("communication-bound", measured(*REDUCE, gradient_bytes=1 << 10), "--batch-size"),
    ("communication-bound", measured(*REDUCE, script=True), "no_sync"),
    ("communication-bound", measured(*TAKE_TURNS, gradient_bytes=1 << 10), "--batch-size"),
    ("straggler", measured({"all_reduce": 0.3}, {"forward": 0.32}), "rank 1"),
    ("straggler", measured(*LATE), "300 ms longer for its data"),
]


@pytest.mark.parametrize(("kind", "numbers", "says"), VERDICTS)
def test_the_largest_part_of_the_step_is_the_verdict_and_has_one_remedy(kind, numbers, says):
    verdict = diagnose(numbers)
    assert verdict.kind == kind, verdict
    assert says in f"{verdict.why} {verdict.change}"
    assert milliseconds(verdict.step) in verdict.why


def test_the_advice_is_filled_in_the_ceiling_amdahls_and_some_waits_are_notes():
    numbers = measured(DATA, counts={"checkpoint": 4})
    facts = bottleneck._facts(StepPart(kind="checkpoint-bound", seconds=0.1), numbers)
    conditions = bottleneck._conditions(numbers)
    for why, change in ADVICE.values():
        for one in (why, change):
            cases = one if isinstance(one, dict) else {"else": one}
            assert cases.keys() <= conditions.keys()
            assert "{" not in "".join(text.format(**facts) for text in cases.values())
    shown = [milliseconds(seconds) for seconds in (0.0, 4.2e-6, 0.00123, 0.0456, 0.12, 4.2)]
    assert shown == ["0 ms", "0.0042 ms", "1.23 ms", "45.6 ms", "120 ms", "4,200 ms"]
    verdict = diagnose(measured({"data": 0.3}, checkpoint=0.1, operations=operations()))
    assert verdict.step == pytest.approx(0.3 + 0.071 + 0.1)
    assert verdict.ceiling == pytest.approx(verdict.step / 0.171)
    assert (verdict.next_kind, verdict.next_seconds) == ("checkpoint-bound", 0.1)
    verdict = diagnose(measured({"data": 0.3, "other": 0.003}))
    assert (verdict.kind, verdict.next_kind) == ("input-bound", "loop-bound")
    verdict = diagnose(measured(dict.fromkeys(STEP, 0.0)))
    assert (verdict.share, verdict.ceiling) == (0.0, pytest.approx(1.0))
    few = Operations(matmul=1.0, syncs=3.0)
    assert ".item()" in diagnose(measured(operations=few)).notes[0]
    assert not diagnose(measured(operations=Operations(matmul=1.0))).notes
    waits = {"data": 0.03}
    assert any("--num-workers" in note for note in diagnose(measured(waits)).notes)
    assert not diagnose(measured(waits, workers=2)).notes
    assert not diagnose(measured({"data": 0.01})).notes


def test_more_threads_than_cores_are_a_cause_and_the_evidence_names_operations_of_its_kind():
    slow = measured(operations=operations(launch=0.6), threads=16, cores=4)
    slow = replace(slow, ranks=(replace(slow.ranks[0], starved=0.03, wanted_cores=9.0),))
    verdict = diagnose(slow)
    assert verdict.kind == "oversubscribed"
    assert "--threads 4" in verdict.change
    workers = diagnose(replace(slow, threads=4, workers=3))
    assert workers.change.startswith("Fewer workers: 3")
    top = {"top_matmul": (("mm", 0.3),), "top_memory": (("add", 0.2),)}
    for kind, shares in (("memory", {"memory": 0.8, "matmul": 0.2}), ("compute", {"matmul": 1.0})):
        verdict = diagnose(measured(operations=Operations(**shares, **top)))
        assert verdict.kind == f"{kind}-bound"
        named = ("mm 30%" in verdict.why, "add 20%" in verdict.why)
        assert named == (kind == "compute", kind == "memory")


@pytest.mark.parametrize("wanted", [1.0, 9.0])
def test_a_neighbour_on_the_machine_is_a_note_and_no_verdict(wanted):
    """One thread of ours on four cores waited for one, so somebody else had them."""
    crowded = measured(operations=operations(), threads=1, cores=4)
    rank = replace(crowded.ranks[0], starved=0.03, wanted_cores=wanted)
    verdict = diagnose(replace(crowded, ranks=(rank,)))
    assert verdict.kind == "compute-bound"
    (note,) = verdict.notes
    assert "30.0 ms" in note


SECONDS = st.floats(0.0, 1.0)


@given(
    phases=st.lists(
        st.fixed_dictionaries(dict.fromkeys(STEP, st.floats(1e-6, 1.0))), min_size=1, max_size=4
    ),
    evaluation=SECONDS,
    checkpoint=SECONDS,
    shares=st.tuples(*[st.floats(0.01, 1.0)] * 4),
)
def test_the_parts_always_add_up_to_the_step(phases, evaluation, checkpoint, shares):
    names = ("launch", "matmul", "memory", "sync")
    numbers = measured(
        *phases,
        evaluation=evaluation,
        checkpoint=checkpoint,
        operations=Operations(**dict(zip(names, shares, strict=True))),
    )
    parts = bottleneck.split(numbers)
    step = numbers.typical.step + evaluation + checkpoint
    assert sum(part.seconds for part in parts) == pytest.approx(step)
    assert all(part.seconds >= 0 for part in parts)
    assert diagnose(numbers).step == pytest.approx(step)


@pytest.mark.parametrize("traced", [0.2, 0.45, 0.7])
def test_on_a_gpu_the_verdict_does_not_depend_on_how_much_tracing_delays_the_host(traced):
    """Of the 70 ms that an untraced step computes, kernels take 50, whatever traced steps show."""
    found = Operations(launch=traced, memory=0.6 * (1 - traced), matmul=0.4 * (1 - traced))
    verdict = diagnose(measured(operations=replace(found, gpu_busy=0.05), device="cuda"))
    assert verdict.kind == "memory-bound"
    assert verdict.seconds == pytest.approx(0.03)
    parts = {part.kind: part.seconds for part in verdict.parts}
    assert parts["launch-bound"] == pytest.approx(0.02)


SLOW = pytest.mark.slow
PLANTED = [pytest.param(s, id=s.name, marks=[SLOW] if s.slow else []) for s in SITUATIONS]


@pytest.mark.parametrize("situation", PLANTED)
def test_the_bottleneck_that_was_planted_is_the_verdict(tmp_path, situation):
    command = situation.command(tmp_path, seconds=0.4)
    ranks = start(*command, world_size=situation.nproc, folder=tmp_path / "out")
    assert ranks.wait() == [0] * situation.nproc, ranks.output()
    verdict = read(tmp_path)["verdict"]
    if verdict["kind"] != situation.verdict:
        # Others that use the cores may take more of a step than what was planted, if it says so.
        assert "Other programs use the cores" in " ".join(verdict["notes"]), ranks.output()
        return
    assert situation.says in f"{verdict['why']} {verdict['change']}"
    assert verdict["ceiling"] > 1
    assert verdict["next_kind"] != verdict["kind"]


RANK = MeasuredRank(phases={"forward": 0.02, "backward": 0.03, "other": 0.001, "evaluation": 0.0})
MEASURED = MeasuredSteps(ranks=(RANK,), steps=284, samples=32, cores=2, script=True)


def shown(measured: MeasuredSteps) -> dict[str, str]:
    profile = Profile(name="x", path=Path("x"), measured=measured, verdict=diagnose(measured))
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(profile, console)
    lines = [line for line in console.file.getvalue().splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    return {line.split()[0]: line for line in lines}


def test_what_was_measured_has_its_share_and_a_gpus_idle_share_is_without_the_profiler():
    lines = shown(MEASURED)
    for phase in ("evaluation", "checkpoint"):
        assert lines[phase].split()[1:] == ["not", "seen", "in", "284", "steps"]
    assert "evaluations" not in lines["speed"]
    phases = {**RANK.phases, "evaluation": 0.049}
    lines = shown(replace(MEASURED, ranks=(replace(RANK, phases=phases),) * 2))
    assert lines["evaluation"].split()[1:] == ["49.0", "49.0", "49%"]
    assert lines["checkpoint"].split()[-3:] == ["in", "284", "steps"]
    assert ("evaluations" in lines["speed"], "checkpoints" in lines["speed"]) == (True, False)
    recipe = replace(MEASURED, script=False, checkpoint=0.001)
    assert "evaluation" not in shown(recipe)
    lines = shown(replace(recipe, checkpoint=0.0, stopped=True))
    assert "284" in lines["checkpoint"]
    assert "284 steps" in lines["note"]
    rank = replace(RANK, operations=Operations(matmul=1.0, gpu_busy=0.03))
    measured = replace(MEASURED, ranks=(rank,), wall=0.04, device="cuda")
    profile = Profile(name="x", path=Path("x"), measured=measured, verdict=diagnose(measured))
    assert json.loads(profile.as_json())["measured"]["gpu_idle"] == pytest.approx(0.25)
    assert "25%" in shown(measured)["gpu"]
    assert replace(measured, wall=0.02).gpu_idle == 0
    assert "gpu" not in shown(MEASURED)
    assert MEASURED.gpu_idle is None


@pytest.mark.parametrize("width", [60, 80])
def test_the_table_of_a_sweep_cuts_no_number_and_no_heading(width):
    times = {"seconds": 0.012345, "data": 0.00123, "samples_per_s": 115_360.0}
    row = SweepRow(value=64, **times, ratio=1.0, low=0.98, high=1.02, helps=True)
    found = Sweep(setting="batch_size", rows=(row, replace(row, value=32)), best=64)
    lines = list(text_lines(sweep_table(found), width))
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for word in ("--batch-size", "waiting", "before", "samples/s", "115,360", "0.98–1.02"):
        assert word in words
