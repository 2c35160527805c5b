"""The comparison for programs: one JSON object."""

from dataclasses import asdict
from typing import Any

from samestep.comparison.side_by_side import Comparison


def as_table(found: Comparison) -> dict[str, Any]:
    """Return everything as JSON has it; lists have an entry a run, in the order given."""
    return {
        "runs": [
            {
                "name": name,
                "run_dir": str(run.path),
                "recipe": run.recipe,
                "status": run.status,
                "problems": list(run.problems),
                **{key: run.plan.get(key) for key in ("world_size", "global_batch_size")},
            }
            for name, run in zip(found.names, found.runs, strict=True)
        ],
        "settings": {
            d.name: {"values": list(d.values), "another_training": d.decides}
            for d in found.differences
        },
        "same_training": [
            {"run": name, "against": found.names[0], **asdict(result)}
            for name, result in zip(found.names[1:], found.alike, strict=True)
        ],
        "throughput": [speed and asdict(speed) for speed in found.throughput],
        "phases_ms_per_step": found.phases,
        "pauses": found.pauses,
        "metric": found.metric,
        "by_samples": found.by_samples and asdict(found.by_samples),
        "by_seconds": found.by_seconds and asdict(found.by_seconds),
        "target": found.target,
        "reached": [goal and asdict(goal) for goal in found.reached],
        "notes": found.notes,
    }
