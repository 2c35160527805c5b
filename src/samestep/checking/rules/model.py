"""Rules about model."""

from collections.abc import Iterator

from samestep.checking.events import Seen
from samestep.checking.findings import Found, NotSeen, rule


@rule(
    "SS209",
    "error",
    "a GPU is chosen by the global rank",
    "On every node but the first the global rank is the number of a GPU that is not there.",
)
def gpu_of_global_rank(seen: Seen) -> Iterator[Found | NotSeen]:
    """Where the ranks seem to have a node each, look at the device that a rank asks for."""
    asked = seen.any("device")
    apart = [event for event in asked if event["rank"] != event["local_rank"]]
    if asked and not apart:
        yield NotSeen("all ranks were on one node, where the global rank is the local one")
    wrong = [e for e in apart if e["asked"] == e["rank"] and not e["alone"]]
    for event in wrong[:1]:
        others = dict.fromkeys(e.where for e in wrong if e.where != event.where)
        yield Found(
            event.where,
            f"with one rank per node, rank {event['rank']} asked for cuda:{event['asked']}, and "
            f"its LOCAL_RANK is {event['local_rank']}"
            + (f" (also {', '.join(others)})" if others else ""),
            'Choose devices by int(os.environ["LOCAL_RANK"]), and data and files by the rank.',
        )
