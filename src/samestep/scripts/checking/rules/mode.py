"""Rules about training and evaluation mode, and what is recorded where nothing is trained."""

from collections.abc import Iterator

from samestep.scripts.checking.events import Event, RankSeen, Seen
from samestep.scripts.checking.findings import Found, NotSeen, rule
from samestep.scripts.checking.rules.evaluation import evaluations, with_loader

_IN_A_ROW = 2
_LEFT_ON = 3  # training steps


@rule("SS706", least_ranks=1)
def trains_in_eval_mode(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for training steps in evaluation mode of a model whose layers depend on it."""
    for rank in seen.ranks:
        for forwards in _training_forwards(rank).values():
            off: list[Event] = []
            for event in reversed(forwards):
                if event["training"]:
                    break
                off.insert(0, event)
            steps = {event.step for event in off}
            on, layers = off[0]["modal"] if off else (0, 0)
            if len(steps) < _LEFT_ON or on or not layers:
                continue
            never = len(off) == len(forwards)
            yield Found(
                off[0].where,
                f"{len(steps)} training steps of {off[0]['model']} from step {off[0].step + 1} on "
                f"ran in evaluation mode, with {layers} layers of dropout or batch norm"
                + ("" if never else "; the steps before did not"),
                "Call `model.train()` at the start of each epoch, after every evaluation.",
                # Some fine-tune so on purpose.
                "advice" if never else None,
            )
            return


@rule("SS707", least_ranks=1)
def evaluates_in_train_mode(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for forward passes without gradients on other data, with layers in training mode."""
    for event in seen.ranks[0].of("dropped"):
        name = event["function"]
        remedy = f"`F.{name}(…, training=self.training)` drops nothing in evaluation mode."
        if name == "scaled_dot_product_attention":
            remedy = "Give it `dropout_p=self.p if self.training else 0.0`."
        yield Found(
            event.where,
            f"after step {event.step} `{name}` dropped values (p={event['p']:g}) of a model in "
            "evaluation mode, without gradients",
            remedy,
        )
    yield from _teachers(seen.ranks[0])
    for rank in seen.ranks:
        row: list[Event] = []
        for event, foreign in with_loader(seen, rank):
            wrong = foreign and not event["grad"] and event["training"] and event["modal"][0]
            row = [*row, event] if wrong else []
            if len(row) >= _IN_A_ROW:
                on, layers = row[0]["modal"]
                yield Found(
                    row[0].where,
                    f"after step {row[0].step} {row[0]['model']} ran without gradients on another "
                    f"loader's batches, with {on} of {layers} layers of dropout or batch norm in "
                    f"training mode",
                    "Call `model.eval()` before the evaluation and `model.train()` after it.",
                )
                return


def _teachers(rank: RankSeen) -> Iterator[Found]:
    """Yield models that never change, and are called in training mode between the steps."""
    trained = {event["model_id"] for event in rank.of("model")}
    by_model: dict[int, list[Event]] = {}
    for event in rank.of("inference"):
        by_model.setdefault(event["model_id"], []).append(event)
    for number, events in by_model.items():
        unsteady = [e for e in events if e["training"] and (e["dropped"] or e["learnt"])]
        if number in trained or len(unsteady) < _LEFT_ON or len({e["weights"] for e in events}) > 1:
            continue
        does = "drops values" if unsteady[0]["dropped"] else "learns the statistics of its batches"
        yield Found(
            unsteady[0].where,
            f"{unsteady[0]['model']}, whose weights never change, {does}: it is in training mode "
            f"in {len(unsteady)} of {len(events)} steps looked at",
            "Call its `eval()` once it is built or loaded, and where `train()` of a model with it "
            "inside undoes that.",
            "warning",
        )


@rule("SS709", least_ranks=1)
def evaluates_with_gradients(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for forward passes in evaluation mode whose graph no backward pass uses."""
    for rank in seen.ranks:
        foreign = {id(event) for event, other in with_loader(seen, rank) if other}
        for part in evaluations(seen, rank):
            kept = [e for e in part.forwards if e["grad"] and id(e) in foreign]
            if len(kept) >= _IN_A_ROW:
                yield Found(
                    kept[0].where,
                    f"{len(kept)} forward passes of {kept[0]['model']} after step {part.step} "
                    f"recorded a graph, and no backward pass followed",
                    "Evaluate under `with torch.no_grad():`.",
                )
                return


def _training_forwards(rank: RankSeen) -> dict[int, list[Event]]:
    """Return, by model, the forward passes that a backward pass followed."""
    found: dict[int, list[Event]] = {}
    pending: list[Event] = []
    for event in rank.of("forward", "backward"):
        if event.kind == "forward":
            pending = [*pending, event] if event["grad"] else []
            continue
        trains = any(one["training"] for one in pending)
        for one in pending:
            # Next to a model in training mode, one in evaluation mode is a teacher or a critic.
            if one["training"] or not trains:
                found.setdefault(one["model_id"], []).append(one)
        pending = []
    return found
