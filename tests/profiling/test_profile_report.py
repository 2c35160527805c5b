"""A profile as people see it, from made-up numbers."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from samestep.profiling.bottleneck import judge
from samestep.profiling.measured import MeasuredRank, MeasuredSteps, Operations
from samestep.profiling.profile_report import Profile, Sweep, SweepRow, show, sweep_table
from samestep.reporting.table import text_lines

RANK = MeasuredRank(phases={"forward": 0.02, "backward": 0.03, "other": 0.001, "evaluation": 0.0})
MEASURED = MeasuredSteps(ranks=(RANK,), steps=284, samples=32, cores=2, script=True)


def shown(measured: MeasuredSteps) -> dict[str, str]:
    """Return the lines of a profile by their first word."""
    profile = Profile(name="x", path=Path("x"), measured=measured, verdict=judge(measured))
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(profile, console)
    lines = [line for line in console.file.getvalue().splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    return {line.split()[0]: line for line in lines}


def test_what_fell_into_the_measured_steps_has_its_share_and_all_else_is_said_to_be_unseen():
    lines = shown(MEASURED)
    for phase in ("evaluation", "checkpoint"):
        assert lines[phase].split()[1:] == ["not", "seen", "in", "284", "steps"]
    assert "evaluations" not in lines["speed"]
    phases = {**RANK.phases, "evaluation": 0.049}
    lines = shown(replace(MEASURED, ranks=(replace(RANK, phases=phases),) * 2))
    assert lines["evaluation"].split()[1:] == ["49.0", "49.0", "49%"]
    assert lines["checkpoint"].split()[-3:] == ["in", "284", "steps"]
    assert ("evaluations" in lines["speed"], "checkpoints" in lines["speed"]) == (True, False)


def test_of_a_recipe_without_evaluation_there_is_no_such_row_unless_it_was_stopped():
    recipe = replace(MEASURED, script=False, checkpoint=0.001)
    assert "evaluation" not in shown(recipe)
    lines = shown(replace(recipe, checkpoint=0.0, stopped=True))
    assert "284" in lines["checkpoint"]
    assert "284 steps" in lines["note"]


def test_the_idle_share_of_a_gpu_is_that_of_the_steps_measured_without_the_profiler():
    rank = replace(RANK, operations=Operations(matmul=1.0, gpu_busy=0.03))
    measured = replace(MEASURED, ranks=(rank,), wall=0.04, device="cuda")
    profile = Profile(name="x", path=Path("x"), measured=measured, verdict=judge(measured))
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
