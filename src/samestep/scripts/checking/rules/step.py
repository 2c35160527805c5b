"""Rules about a step: accumulation, clipping, and the weight of each sample."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from samestep.scripts.checking.events import Event, RankSeen, Seen
from samestep.scripts.checking.findings import Found, NotSeen, replaced, rule
from samestep.scripts.checking.rules.data import uneven_batches

_FEW_STEPS = 3
_UNLIKE = 1.01  # weights of samples are the same within this factor
_UNLIKE_COUNTS = 1.1  # token counts of batches of one size differ by chance as well
_EXACT_STEP, _ROUGH_STEP = 1e-3, 5e-2
_SCALE = 1024.0  # a scaler multiplies by more


@rule("SS301")
def accumulates_without_no_sync(seen: Seen) -> Iterator[Found | NotSeen]:
    """Count the backward passes of one line that meet the other ranks in one step."""
    rank = seen.ranks[0]
    wrap = rank.first("wrap")
    if wrap is None or wrap["wrapper"] != "ddp":  # FSDP may have no memory to put it off
        return
    counts: Counter[tuple[str, int]] = Counter()
    here: Counter[str] = Counter()
    for event in rank.of("backward", "step"):
        if event.kind == "step":
            counts.update(here.items())
            here.clear()
        elif event.get("sync"):
            here[event.where] += 1
    for where in {where for where, _ in counts}:
        often = Counter(
            {n: steps for (place, n), steps in counts.items() if place == where and n > 1}
        )
        if sum(often.values()) < 2:
            continue
        ((most, steps),) = often.most_common(1)
        yield Found(
            where,
            f"{most} backward passes per optimizer step, each with an all-reduce of "
            f"{wrap['parameters']:,} gradients ({steps} steps of rank 0)",
            "Run all but the last micro-batch of a step, forward and backward, within "
            "`with model.no_sync():`.",
            comes_from={"DDP is made": wrap.where},
        )


@rule("SS302", least_ranks=1)
def clips_scaled_gradients(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for clipping between `scale` and `unscale_`."""
    clips = [event for event in seen.ranks[0].of("clip") if event["scaled"] > 1]
    times = Counter(event.where for event in clips)
    for where, number in times.items():
        event = next(event for event in clips if event.where == where)
        norm = f"; their norm was {event['norm']:.4g}" if event["norm"] is not None else ""
        line = seen.line(where)
        step = seen.ranks[0].first("step")
        optimizer = seen.optimizer_at(step.where if step else "")
        yield Found(
            where,
            f"{event['name']} with a limit of {event['most']:g} on gradients that are still "
            f"multiplied by {event['scaled']:g}{norm} ({number} times)",
            f"+ scaler.unscale_({optimizer})\n  {line}" if line else "",
        )


@rule("SS303")
def clips_before_the_all_reduce(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for clipping that the reduction of the same gradients follows within the step."""
    found: dict[str, Found] = {}
    before: Event | None = None
    met = 0  # elements that were reduced since
    norms = [{id(e): n for n, e in enumerate(rank.of("clip"))} for rank in seen.ranks]
    others = [rank.of("clip") for rank in seen.ranks]
    for event in seen.ranks[0].of("clip", "collective", "backward", "step"):
        if event.kind == "step":
            before = None
        elif event.kind == "clip":
            before, met = event, 0
        elif before is not None and before.where not in found:
            place = norms[0][id(before)]
            alike = [clips[place]["norm"] for clips in others if len(clips) > place]
            unlike = None not in alike and not _close(alike, 1 + 1e-4)
            if event.kind == "backward":
                later = bool(event.get("sync")) and unlike
            else:
                # Most of what was clipped, and no number that is logged and as large as a bias.
                sizes = (math.prod(shape) for shape in event.get("shapes", []))
                known, whole = {*before["sizes"], sum(before["sizes"])}, sum(before["sizes"])
                met += sum(size for size in sizes if size in known)
                later = event["kind"] == "all_reduce" and 2 * met > whole
            if later:
                numbers = ", ".join(f"{norm:.4g}" for norm in alike if norm is not None)
                told = f"; the norms on the ranks were {numbers}" if unlike else ""
                found[before.where] = Found(
                    before.where,
                    f"{before['name']} with a limit of {before['most']:g} comes before the "
                    f"all-reduce at {event.where}{told}",
                    "Clip once per step, after the gradients have been averaged.",
                )
    yield from found.values()


@rule("SS307")
def averages_unequal_shares(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the weight of a sample on each rank in steps whose batches differ in size."""
    if any(isinstance(said, Found) for said in uneven_batches(seen)):
        return  # the ranks do not even take the same steps
    yield from _unlike_weights(seen, shares=True)


@rule("SS308")
def divides_by_own_count(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the weight of a token on each rank in steps whose batches have the same size."""
    yield from _unlike_weights(seen, shares=False)


def _unlike_weights(seen: Seen, *, shares: bool) -> Iterator[Found]:
    """Yield the first step in which a summand of the loss does not count alike on all ranks."""
    unlike: list[list[tuple[Event, int]]] = []
    for losses in zip(*(_losses(rank) for rank in seen.ranks), strict=False):
        averages = [event for event, _, _ in losses if event is not None]
        if len(averages) < len(losses) or not all(synced for _, _, synced in losses):
            continue
        differ = len({n for _, n, _ in losses}) > 1
        within = _UNLIKE if shares else _UNLIKE_COUNTS
        if (
            differ == shares
            and _close([event["other"] for event in averages], _UNLIKE)
            and not _close([event["weight"] for event in averages], within)
        ):
            counts = [n for _, n, _ in losses]
            unlike.append(list(zip(averages, counts, strict=True)))
    if not unlike or (not shares and len(unlike) < 2):
        return
    first = unlike[0]
    event = first[0][0]
    by = " and ".join(f"{one['by']:g}" for one, _ in first)
    if shares:
        samples = " and ".join(str(n) for _, n in first)
        evidence = (
            f"in step {event.step + 1} the ranks have {samples} samples, and each divides its loss "
            f"by its own count ({by})"
        )
        remedy = "Give every rank the same number of samples, or multiply each rank's loss by its "
        remedy += "count × world size / the sum of the counts (an all-reduce)."
    else:
        evidence = (
            f"in step {event.step + 1} the ranks divide their losses by {by} for batches of "
            f"{first[0][1]} samples each ({len(unlike)} such steps)"
        )
        remedy = "All-reduce the count, and divide the summed loss by count / world size."
    yield Found(event.where, evidence, remedy)


def _losses(rank: RankSeen) -> Iterator[tuple[Event | None, int, bool]]:
    """Yield the mean that each backward pass began with, its samples, and if others meet it."""
    samples, average = 0, None
    for event in rank.of("forward", "average", "backward"):
        if event.kind == "forward":
            samples += (event.get("n") or 0) if event["grad"] else 0
        elif event.kind == "average":
            average = event
        else:
            yield average, samples, bool(event.get("sync"))
            samples, average = 0, None


@rule("SS309", residual=True)
def not_the_joined_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare what the optimizer was given with the gradient of all parts in one process."""
    event = seen.ranks[0].first("parity")
    if event is None or event.get("not_seen") or seen.ranks[0].steps < 2:
        why = "fewer than two optimizer steps were taken, or the script failed"
        yield NotSeen(event.get("not_seen", why) if event is not None else why)
        return
    most = _ROUGH_STEP if event["rough"] else _EXACT_STEP
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


@rule("SS310", least_ranks=1)
def steps_with_scaled_gradients(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for an optimizer's own step where the scaler's was meant."""
    for event in seen.ranks[0].of("scaled_step"):
        line, optimizer = seen.line(event.where), seen.optimizer_at(event.where)
        instead = line.replace(f"{optimizer}.step()", f"scaler.step({optimizer})", 1)
        yield Found(
            event.where,
            f"the optimizer steps with gradients that are multiplied by {event['scale']:g}: since "
            "`scale` neither `unscale_` nor the scaler's `step` was called",
            f"- {line}\n+ {instead}\n+ scaler.update()" if instead != line else "",
        )


@rule("SS312", least_ranks=1)
def casts_of_earlier_weights(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for two steps between which the outermost autocast was not left."""
    event = seen.ranks[0].first("stale_autocast")
    if event is not None:
        yield Found(
            event.where,
            f"by step {event.step + 1} two steps were taken within one `torch.autocast`, which "
            "keeps its casts of weights until it is left",
            "Enter autocast for each forward and loss: `with torch.autocast(…):` inside the loop.",
        )


@rule("SS313")
def adds_up_again(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for an all-reduce between DDP's own and the step that multiplies by the world size."""
    rank = seen.ranks[0]
    wrap = rank.first("wrap")
    if wrap is None or wrap["wrapper"] != "ddp":
        return
    met, sums, again = False, list[Event](), list[Event]()
    for event in rank.of("backward", "collective", "gradients"):
        if event.kind == "backward":
            met, sums = bool(event.get("sync")), []
        elif event.kind == "collective":
            sums += [event] if event["kind"] == "all_reduce" and event.get("op") == "SUM" else []
        elif met and abs(event["grown"] / seen.world_size - 1) < _EXACT_STEP:
            summed = sum(math.prod(shape) for one in sums for shape in one["shapes"])
            again += sums[:1] if 2 * summed > wrap["parameters"] else []  # no number that is logged
    if len(again) >= _FEW_STEPS:
        yield Found(
            again[0].where,
            f"in {len(again)} steps an all-reduce makes the gradients that DDP has averaged "
            f"{seen.world_size} times as large",
            "Leave out the all-reduce: DDP has averaged them in the backward pass.",
            comes_from={"DDP is made": wrap.where},
        )


@rule("SS314", least_ranks=1)
def adds_up_micro_batches(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for steps of several means, each of its own batch of one loader."""
    rank = seen.ranks[0]
    whole: list[tuple[Event, int, Event]] = []
    passes: list[tuple[Event, int | None]] = []
    loader, average, steps = None, None, 0
    for event in rank.of("batch", "average", "backward", "gradients"):
        if event.kind == "batch":
            loader = event["loader_id"]
        elif event.kind == "average":
            average = event if _is_plain_mean(event) else None
        elif event.kind == "backward":
            passes.append((event, loader if average is not None else None))
            loader, average = None, None
        else:
            alike = len({(one.where, number) for one, number in passes}) == 1
            if len(passes) > 1 and alike and passes[0][1] is not None and event["grown"] == 1.0:
                whole.append((passes[0][0], len(passes), event))
            steps += bool(passes)
            passes = []
    if len(whole) >= _FEW_STEPS and 2 * len(whole) > steps:
        backward, times, step = whole[0]
        line = seen.line(backward.where)
        instead = re.sub(r"([\w.]+)\.backward\(", rf"(\1 / {times}).backward(", line, count=1)
        yield Found(
            backward.where,
            f"{times} micro-batches per step ({len(whole)} steps), and each loss is the mean of "
            "its own: their sum is the gradient",
            replaced(line, instead, "Divide each by their number."),
            # The others divide the gradient by its own size.
            None if step["optimizer"] == "SGD" else "advice",
        )


def _is_plain_mean(average: Event) -> bool:
    """Whether a loss is divided by its own count, and at most multiplied by a scaler."""
    times = average["weight"] * average["count"]
    scaled = times >= _SCALE and math.log2(times).is_integer()
    own = average["by"] == average["count"] and average["other"] == 1.0
    return own and (math.isclose(times, 1.0) or scaled)


def _close(numbers: Sequence[float], within: float) -> bool:
    """Whether numbers are the same within a factor."""
    least, most = min(map(abs, numbers)), max(map(abs, numbers))
    return most <= within * least or most == 0
