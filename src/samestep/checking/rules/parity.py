"""For what no other rule explains: the gradient of the first step beside the joined batch's."""

from collections.abc import Iterator

from samestep.checking.events import Seen
from samestep.checking.findings import Found, NotSeen, rule

_EXACT, _ROUGH = 1e-3, 5e-2


@rule(
    "SS309",
    "error",
    "the step is not that of the joined batch",
    "One process that trains on all the ranks' samples would take another step, so the training "
    "changes with the number of ranks.",
    residual=True,
)
def not_the_joined_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare what the optimizer was given with the gradient of all parts in one process."""
    event = seen.ranks[0].first("parity")
    if event is None or event.get("not_seen"):
        yield NotSeen(event["not_seen"] if event is not None else "no first step was kept whole")
        return
    most = _ROUGH if event["rough"] else _EXACT
    sizes = " + ".join(map(str, event["sizes"]))
    if event["residual"] <= most:
        return
    if event["direction"] <= most:
        times = event["scale"]
        yield Found(
            event.where,
            f"the gradient of the first step is {times:.4g} times that of the joined batch of "
            f"{sizes} samples",
            "Average gradients over the ranks, rather than add them up: divide by the world size."
            if abs(times - seen.world_size) < most * seen.world_size
            else "Weight each rank's loss by its share of the batch.",
        )
        return
    first = f", first in {event['first']}" if event["first"] else ""
    yield Found(
        event.where,
        f"the gradient of the first step differs by {event['residual']:.1%} from that of the "
        f"joined batch of {sizes} samples, computed in one process{first}",
    )
