"""What ranks tell each other in a step, counted by PyTorch's own profiler."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from samestep.commands.train import parse
from samestep.ranks.world import find_world, join, leave
from samestep.session.build import build
from samestep.training.loop import rehearse
from tests import tiny
from tests.processes import run_ranks

TERMS = """
from dataclasses import replace
recipe = replace(recipe, loss_terms=lambda batch: 2.0 * len(batch[1]))
"""
STEPS = 5


def _collectives(cases: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the collectives of a few steps of each training, in order."""
    world = find_world("cpu")
    join(world)
    found = {}
    for name, arguments in cases.items():
        _, request = parse([*arguments, "--device", "cpu", "--log-every", "100"])
        request = replace(request, options=request.recipe.complete_options(request.options))
        training = build(request, world)
        steps = rehearse(training.work, training.state)
        list(islice(steps, 3))  # ranks agree on the first, and DDP arranges its buckets after it
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            list(islice(steps, STEPS))
        found[name] = [e.name for e in profiler.events() if e.name.startswith("c10d::")]
    leave(world)
    return found


def test_loss_terms_add_no_collective_to_a_step(tmp_path: Path):
    plain = str(tiny.write_recipe(tmp_path))
    terms = str(tiny.write_recipe(tmp_path, tiny.RECIPE + TERMS, "terms.py"))
    cases = {
        "plain": [plain],
        "terms": [terms],
        "plain, unused": [plain, "--find-unused"],
        "terms, unused": [terms, "--find-unused"],
    }
    for found in run_ranks(_collectives, 2, tmp_path / "output", cases):
        assert found["plain"] == ["c10d::allreduce_"] * STEPS
        assert found["terms"] == found["plain"]
        # There the terms cannot travel with the gradients: the count sees what is added.
        assert len(found["terms, unused"]) == len(found["plain, unused"]) + STEPS
