"""Evidence without processes: what an undisturbed verification leaves, and what may be changed."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.core.data.order import share
from samestep.launch.ranks.world import World
from samestep.prove.verification.evidence import Check, Evidence
from samestep.prove.verification.few_samples import choose_training_size, cut_down, num_samples
from samestep.prove.verification.recipe_under_test import RecipeUnderTest
from samestep.prove.verification.rows import check_rows, plan_trainings
from samestep.prove.verification.rows.loss import LossOfParts
from samestep.prove.verification.rows.model import ProcessOutputs
from samestep.prove.verification.rows.state import ModuleCall
from samestep.prove.verification.short_trainings import RankReport, RecipeFacts, plan_starts
from samestep.prove.verification.trace import Trace
from samestep.shell.commands.target import parse_target
from samestep.shell.commands.verify import FORM


def kept_call(name: str, given: list[float], made: list[float]) -> ModuleCall:
    return ModuleCall(name, [torch.tensor(given)], [torch.tensor(made)])


def computed(**changes: Any) -> ProcessOutputs:
    """Return what each process makes of its model and of some samples, or something else."""
    calls = [kept_call("first", [1.0, 2.0], [3.0]), kept_call("", [1.0, 2.0], [4.0])]
    calls.append(kept_call("the loss", [4.0], [0.5]))
    weights = {"first.weight": torch.tensor([5.0, 3.0, 4.0])}
    known = {"model": "Net", "weights": weights, "samples": ["a", "b"]}
    return ProcessOutputs(**{**known, "calls": calls, **changes})


def trace(facts: RecipeFacts, rank: int = 0, world_size: int = 1) -> Trace:
    """Return what one rank keeps of an undisturbed training; losses 1, 1/2, 1/3 …"""
    size = facts.size
    steps = range(1, size.steps + 1)

    def samples(step: int) -> list[str]:
        rows = size.rest if step == size.uneven_step else size.global_batch
        return [f"{step}.{row}" for row in share(range(rows), rank, world_size)]

    values = {"first.weight": np.array([5.0, 3.0, 4.0])}
    evaluation = {"loss": 0.7, "accuracy": 0.5}
    return Trace(
        losses={step: 1 / step for step in steps},
        norms=dict.fromkeys(steps, 1.0),
        gradients={step: copy.deepcopy(values) for step in steps},
        weights={step: copy.deepcopy(values) for step in steps},
        samples={step: samples(step) for step in steps},
        evaluations={step: dict(evaluation) for step in (0, size.stop)},
        evaluated=[str(k) for k in share(range(size.num_evaluated), rank, world_size)],
    )


def undisturbed(sizes: tuple[int, ...] = (1, 2), **found: Any) -> Evidence:
    """Return the evidence of a training that is the same, with some rows' own findings."""
    size = choose_training_size(60, 30, sizes)
    facts = RecipeFacts(num_samples=60, size=size, evaluates="validation", lightning=True)
    return with_facts(
        Evidence(
            facts=facts, starts=plan_starts(sizes), traces={}, reports={}, ended={}, chosen="fp32"
        ),
        **found,
    )


def with_facts(evidence: Evidence, *, present: frozenset = frozenset(), **found: Any) -> Evidence:
    """Return undisturbed evidence about a recipe of which the first process found all this.

    Args:
        evidence: its starts and sizes.
        present: the kinds of draws that the recipe has.
        found: row, with `_` for a space → what its experiment found.
    """
    kept = {name.replace("_", " "): value for name, value in found.items()}
    facts = replace(
        evidence.facts, present=present, results={"loss": LossOfParts(0.0, 0.0), **kept}
    )
    traces, reports = {}, {}
    for start in evidence.starts:
        ranks = range(start.world_size)
        for training in plan_trainings(start, facts, evidence.chosen):
            traces[start.place, training.name] = [trace(facts, r, start.world_size) for r in ranks]
        on_ranks = {"order": ["a", "b"], "metrics": {}}
        on_ranks["processes"] = computed()
        reports[start.place] = [RankReport(num_samples=60, results=dict(on_ranks)) for _ in ranks]
    reports[evidence.starts[-1].place][0].results["one device"] = {"loss": 0.7, "accuracy": 0.5}
    return replace(evidence, facts=facts, traces=traces, reports=reports)


def checks(evidence: Evidence) -> dict[str, Check]:
    return {check.name: check for check in check_rows(evidence)}


def different(evidence: Evidence) -> dict[str, str | None]:
    return {check.name: check.cause.name for check in check_rows(evidence) if not check.passed}


def recipe_under_test(recipe: Path, *flags: str) -> RecipeUnderTest:
    """Return a recipe with its few samples in this process."""
    _, request = parse_target(FORM, [str(recipe), "--device", "cpu", *flags])
    splits = request.recipe.load_data(request.options)
    size = choose_training_size(num_samples(splits.train), num_samples(splits.validation), (1, 2))
    return RecipeUnderTest(
        recipe=request.recipe,
        options=request.options,
        settings=replace(request.settings, precision="fp64"),
        splits=cut_down(splits, size.num_samples, size.num_evaluated),
        size=size,
        world=World(device=torch.device("cpu")),
    )
