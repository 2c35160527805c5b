"""A training that continues when one of its ranks dies, or another joins: in the same processes.

The ranks that are left find the next group, build the training anew for it, and continue from what
the most advanced of them holds. Nothing is read from the disk, and no step is taken twice.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from samestep.base.errors import caused
from samestep.base.run.records import Record
from samestep.base.trees import map_tensors
from samestep.core.data.order import held_parts
from samestep.core.session.build import Built
from samestep.core.session.session import Holding, Session
from samestep.core.training.loop import RoomNeeded
from samestep.core.training.snapshot import capture, restore
from samestep.core.training.work import State, Work
from samestep.launch.ranks.process import is_lost_peer
from samestep.launch.ranks.regroup import Membership
from samestep.launch.ranks.world import World

_OF_A_RANK = ("rng", "loss_sums", "part_sums", "measured", "stream")
"""What each rank adds to a checkpoint."""


def has_parted(error: Exception, membership: Membership, world: World) -> bool:
    """Part from the group if that is what an error means: a rank is lost, or one wants to join.

    Returns whether another group follows.
    """
    makes_room = isinstance(error, RoomNeeded)
    if not (makes_room or is_lost_peer(caused(error))):
        return False
    if makes_room and world.is_main:
        membership.make_room()
    membership.part()
    return not membership.has_failed()


def holding_of(
    built: Built | None, recipe: str, before: Holding, session: Session | None
) -> Holding:
    """Return this rank's state of a training that has begun, without asking others.

    Once it is `trained`, the model may hold other weights: the last checkpoint is read. So it is
    where a rank had what no other has: a shard of the weights, or rows of carried state.
    """
    if built is None or session is None or not session.begun:
        return before
    work, state, content = built.work, built.state, before.content
    if session.trained or work.learner.sharded or work.learner.carried is not None:
        content = None
    elif state.position.step or before.content:
        alone = World(device=work.world.device, virtual_ranks=work.world.virtual_ranks)
        state.measured.settle()
        content = capture(replace(work, world=alone), state, recipe)
    return replace(
        before,
        content=content,
        parts=tuple(held_parts(work.world)),
        due_again=state.due_again,
        was_main=work.world.is_main,
        recent=session.recent,
    )


def take_over(holding: Holding, work: Work, state: State, recipe: str) -> list[Record] | None:
    """Bring this rank to where the most advanced one is; None if no rank has a training.

    All ranks of the new group call it, newcomers too. Returns the records of the newest step.
    """
    world = work.world
    content: Mapping[str, Any] = holding.content or {}
    own = {name: content[name] for name in _OF_A_RANK if name in content}
    ranks = world.gather((holding.progress, own, holding.parts, holding.recent))
    newest = max(progress for progress, *_ in ranks)
    if not newest:
        return None
    source = next(rank for rank, (progress, *_) in enumerate(ranks) if progress == newest)
    if any(progress != newest for progress, *_ in ranks):
        mine = map_tensors(Tensor.cpu, dict(content)) if world.rank == source else {}
        content = world.broadcast(mine, source)
    newest_parts = [(own, parts) for progress, own, parts, _ in ranks if progress == newest]
    restore(work, state, recipe, {**content, **_together(newest_parts, world)})
    state.due_again = not newest[-1]
    recent = ranks[source][3]
    return [record for record in recent.values() if record.get("step") == newest[0]]


def _together(ranks: list[tuple[dict[str, Any], tuple[int, ...]]], world: World) -> dict[str, Any]:
    """Put together what each rank has of its own.

    What a dead rank had measured is lost: the metrics over the training epoch are then left out.
    """
    first = ranks[0][0]
    measured = [part for own, _ in ranks for part in own["measured"]]
    if world.virtual_ranks:
        by_part = {
            n: m for own, parts in ranks for n, m in zip(parts, own["measured"], strict=False)
        }
        complete = sorted(by_part) == [*range(world.num_parts)]
        measured = [by_part[part] for part in sorted(by_part)] if complete else []
    return {**first, "measured": measured, "stream": [s for own, _ in ranks for s in own["stream"]]}


def regroup_record(membership: Membership, step: int) -> Record:
    """Return the record of ranks that have found together anew."""
    group = membership.group
    assert group is not None
    return {
        "event": "regroup",
        "step": step,
        "ranks_before": group.before,
        "world_size": len(group.members),
        "gone": list(group.gone),
        "seconds": max(0.0, time.time() - group.began),
    }
