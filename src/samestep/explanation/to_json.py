"""An explanation as one JSON object, with all of its numbers."""

import json
from dataclasses import asdict, replace
from typing import Any

from samestep.explanation.explain import Explanation
from samestep.settings import as_table
from samestep.training.plan import ENDLESS


def to_json(told: Explanation) -> str:
    """Return the object; what nobody knows is null."""
    world = told.world
    own = {"settings", "world", "plan", "others", "memory"}
    # Settings and the world hold what is no JSON, and are told in their own way.
    rest = replace(told, memory=None, others=())
    found: dict[str, Any] = {
        name: _plain(getattr(rest, name)) for name in vars(rest) if name not in own
    }
    found["plan"] = told.plan.record()
    found["ranks"] = {
        "world_size": world.world_size,
        "num_nodes": world.num_nodes,
        "ranks_per_node": world.local_world_size,
        "backend": world.backend,
    }
    found["settings"] = as_table(told.settings)
    found["memory"] = None
    if told.memory is not None:
        found["memory"] = {**asdict(told.memory), "total_bytes": told.memory.total}
    found["others"] = [
        {**asdict(o), "total_steps": o.total_steps if o.total_steps < ENDLESS else None}
        for o in told.others
    ]
    return json.dumps(found, indent=2, default=list)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
