"""Rules about a training that was killed and resumed: what it reads, its state, its checkpoints.

They judge a `Resumed`, not one run. The state that a start begins with is compared with the one
before the kill; what follows, with the same steps of the whole run.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from samestep.base.words import count
from samestep.scripts.checking.events import Event, Seen
from samestep.scripts.checking.findings import Found, NotSeen, rule
from samestep.scripts.checking.starts import Attempt, Resumed, Save

_STATE = {
    "weights": "weights",
    "buffers": "buffers",
    "optimizer": "optimizer's state",
    "scale": "loss scale",
    "copies": "average of the weights",
}
_MADE = {"optimizer": "optimizer_made", "scale": "scaler_made", "copies": "copy_made"}
_OF_THE_SCHEDULE = re.compile(r"param_groups|_last_lr|last_epoch|_step_count|sched|\blr\b")
_OF_TIME = re.compile(r"time|second|elapsed|date|speed|duration|throughput|per_s|random|rng|seed")
_OF_AN_AVERAGE = re.compile(r"ema|shadow|average|teacher", re.IGNORECASE)
_NOT_THE_LAST = re.compile(r"best|init|teacher|pretrain|ema|swa|average", re.IGNORECASE)
_ALMOST = 0.9  # of the tensors that a step changes
_CODES = [
    *(f"SS80{n}" for n in range(1, 8)),
    *(f"SS81{n}" for n in range(1, 9)),
    *(f"SS82{n}" for n in range(1, 6)),
    *(f"SS83{n}" for n in range(1, 5)),
]
_REMEDIES = {
    "SS803": "Tell the sampler its epoch, counted from the start of the training.",
    "SS812": "Save `optimizer.state_dict()`, and load it into the optimizer that steps.",
    "SS813": "Save `scheduler.state_dict()`, and load it.",
    "SS815": "Save `scaler.state_dict()`, and load it.",
    "SS816": "Save the average with the model, and load it.",
    "SS817": "Save `torch.get_rng_state()` of each rank, and set it.",
    "SS818": "Save it, and count from there after a resume.",
    "SS823": "Give the thread copies: `clone()`.",
    "SS824": "Write to another name, rename it once it is whole, and let a bad file be an error.",
    "SS831": "Let a resume that finds no checkpoint, or one that does not fit, be an error.",
    "SS832": "Load the checkpoint on every rank.",
    "SS833": "Divide the global batch by the number of ranks.",
    "SS834": "Keep it until a newer one is whole.",
}
_Coded = tuple[str, str, str]
"""A code, the line to blame, what was seen."""


def mistakes(resumed: Resumed) -> Iterator[_Coded]:
    """Yield what is wrong with a resume: its code, the line to blame, what was seen."""
    files = [*_checkpoints(resumed)]
    yield from files
    # What follows from a wrong file, or from a finding of an earlier start, is left out.
    told = {code for code in _CODES if files and code < "SS823"}
    right_so_far = True
    for before, start in pairwise(resumed.chain):
        found = [*_start(resumed, before, start, follows=right_so_far)]
        data = [one for one in found if one[0] < "SS81"]
        if before.offset and data:
            where, text = data[0][1:]
            text = f"the first resume reads what the whole run does, the second not: {text}"
            found = [("SS804", where, text), *(one for one in found if one not in data)]
        right_so_far &= all(code == "SS818" for code, *_ in found)
        yield from (one for one in found if one[0] not in told)
        told |= {code for code, *_ in found}
    for number, start in resumed.others:
        yield from _on_others(resumed, start, number)
    yield from _torn(resumed)


def _of(code: str, seen: Seen) -> Iterator[Found | NotSeen]:
    resumed: Resumed = seen.resumed
    for own, where, text in mistakes(resumed):
        if own == code:
            yield Found(where, text, _REMEDIES.get(code, ""))
    if code < "SS81" and resumed.unsteady("rows"):
        yield NotSeen(
            "two starts of the script read other samples by themselves, or in another order"
        )


for _code in _CODES:
    rule(_code, least_ranks=1)(functools.partial(_of, _code))


def _start(resumed: Resumed, before: Attempt, start: Attempt, *, follows: bool) -> Iterator[_Coded]:
    """Judge one start that resumes; `follows`: whether all before it was as in the whole run."""
    at = before.offset + before.taken
    files, where = start.loaded(), _where_loaded(start)
    if not start.steps:
        if at < resumed.total:
            yield "SS818", where, f"resumed after step {at} of {resumed.total}, it took no step"
        return
    if start.offset == 0 and at:
        read = f"though it read {files[-1]['path']}" if files else "and read no checkpoint"
        text = f"resumed after step {at}, it began with the weights of step 0 again, {read}"
        yield "SS831", where or start.steps[0][0].where, text
        return
    names = [word.partition("=")[2] or word for word in resumed.words]
    if not any(file["path"].startswith(name) for file in files for name in names):  # by the user
        yield from _older(before, start, at)
    yield from _gone(start)
    found = [*_state(resumed, before, start)]
    if follows and not any(code == "SS821" for code, *_ in found):
        found += _schedule(resumed, start)
        found += [] if resumed.unsteady("rows") else _data(resumed, start)
    known = bool(found)
    found = found or [*_random(resumed, start)]
    yield from found
    if follows:
        yield from () if found else _counters(resumed, start)
        yield from _end(resumed, start, explained=known)


def _gone(start: Attempt) -> Iterator[_Coded]:
    """Look for a checkpoint that is changed before the first step, if not by the same one anew."""
    gone = next((event for rank in start.ranks for event in rank.of("gone")), None)
    again = [save for save in start.saves if save.step == start.offset]
    names = start.loaded()[-1]["names"] if gone is not None else []
    if gone is None or any(s.alike(names, "") and s.path == gone["path"] for s in again):
        return
    text = f"{gone['path']}, the checkpoint of step {start.offset}, was removed or written over "
    text += "before the first step after the resume: a kill now loses the training"
    yield "SS834", again[0].event.where if again else _where_loaded(start), text


def _older(before: Attempt, start: Attempt, at: int) -> Iterator[_Coded]:
    """Look for a checkpoint that is newer than the one that was taken."""
    files = start.loaded()
    alike = [s for s in before.saves if any(s.alike(f["names"], f["path"]) for f in files)]
    alike = [save for save in alike if not save.event["apart"]]
    if alike and start.offset < alike[-1].step <= at:
        there = f"there was a checkpoint of step {alike[-1].step}, {alike[-1].path or 'of no name'}"
        text = f"{there}; it took the one of step {start.offset}, {files[-1]['path']}"
        yield "SS825", _where_loaded(start), text


def _state(resumed: Resumed, before: Attempt, start: Attempt) -> Iterator[_Coded]:
    """Compare the state that a start begins with, with that before the kill."""
    for kind, what in _STATE.items():
        # DDP sends rank 0's buffers to all in the next forward.
        ranks = range(1 if kind == "buffers" else len(start.ranks))
        wrong = [rank for rank in ranks if resumed.differs(start, kind, rank)]
        if wrong and 0 not in wrong:
            text = f"rank 0 has the {what} of before the kill, and rank {wrong[0]} has not"
            yield "SS832", _where(start, kind), f"resumed at step {start.offset}, {text}"
        elif wrong:
            found = _of_kind(resumed, before, start, kind)
            yield found
            if found[0] == "SS821":  # what the file holds says nothing about the rest
                return


def _of_kind(resumed: Resumed, before: Attempt, start: Attempt, kind: str) -> _Coded:
    own, known = start.state(start.offset), resumed.before(start)
    assert own is not None
    assert known is not None
    where, at, mine, right = _where(start, kind), start.offset, own[kind], known[kind]
    if kind == "scale":
        return "SS815", where, f"the loss scale is {_plain(mine)}, and was {_plain(right)}"
    if kind == "copies":
        text = "an average of the weights, or another model that the steps change, is not that of"
        return "SS816", where, f"{text} step {at}"
    differ = [n for n, (a, b) in enumerate(zip(mine, right, strict=False)) if a != b]
    text = f"{len(differ)} of {count(len(right), 'tensor')} of the {_STATE[kind]} "
    if len(mine) != len(right):
        text = f"the {_STATE[kind]} begins with {len(mine)} tensors, and had {len(right)} "
    elif kind == "weights" and (names := resumed.whole.ranks[0].first("names")):
        text += f"({', '.join([names['names'][n] for n in differ[:3]])}) "
    text += f"{'is' if len(differ) == 1 else 'are'} not as at step {at}" if differ else ""
    if kind == "optimizer":
        return "SS812", where, text.rstrip()
    saved = [save for save in before.saves if {*mine} <= save.digests and save.step == at]
    if kind == "weights" and saved:  # it restores what the file holds
        text = f"the checkpoint of step {at} holds other weights than the training had: {text}"
        return "SS821", saved[-1].event.where, text
    begin = resumed.whole.steps[0][0][kind]
    anew = sum(n < len(begin) and mine[n] == begin[n] for n in differ)
    return "SS811", where, text + (f"; {anew} as before the first step" if anew else "")


def _schedule(resumed: Resumed, start: Attempt) -> Iterator[_Coded]:
    """Compare the numbers of the optimizers' groups, step by step."""
    whole = [events[0]["groups"] for events in resumed.whole.steps][start.offset :]
    own = [events[0]["groups"] for events in start.steps]
    n = next((n for n, (a, b) in enumerate(zip(own, whole, strict=False)) if a != b), None)
    if n is None:
        return
    rates, right = ([[g.get("lr") for g in groups] for groups in each] for each in (own, whole))
    step = start.offset + n
    if rates[n] == right[n]:
        pairs = zip(own[n], whole[n], strict=False)
        name = next((k for a, b in pairs for k in b if a.get(k) != b[k]), "groups")
        text = f"from step {step} on the optimizer's {name} is not as in the whole run"
        yield "SS812", _where(start, "optimizer"), text
        return
    text = f"the learning rate of step {step} is {_plain(rates[n])} after the resume, "
    text += f"{_plain(right[n])} in the whole run"
    where = _first_of(start, "schedule_made") or _where(start, "optimizer")
    if rates[n] in right[n + 1 :] and right[n] not in rates[n:]:
        yield "SS814", where, f"{text}, which has it in a later step"
    else:
        yield "SS813", where, text


def _data(resumed: Resumed, start: Attempt) -> Iterator[_Coded]:
    """Compare the samples, step by step, and say what became of them."""
    whole, first = resumed.whole, start.offset
    end = min(first + len(start.steps), len(whole.steps))
    wrong = next((n for n in range(first, end) if _rows(whole, n) != _rows(start, n)), None)
    if wrong is None:
        return
    event = start.steps[wrong - first][0]
    where = _first_of(start, "loader_made") or _where_loaded(start) or event.where
    stream = bool(event.get("iterable"))
    redrawn = event["random"] != whole.steps[wrong][0]["random"]
    numbered = whole.numbered and start.numbered
    if numbered and whole.of_step(wrong) == start.of_step(wrong):
        text = f"step {wrong} trains the samples of the whole run with other values"
        yield "SS807", where, text
        return
    begin, stop = next(span for span in resumed.epochs(whole) if span[0] <= wrong < span[1])
    own_end = next(span for span in resumed.epochs(start) if span[0] <= wrong < span[1])[1]
    since = max(begin, first)
    before, expected = whole.samples(begin, since), whole.samples(since, stop)
    got = start.samples(since, own_end)
    other = _epoch_like(resumed, start, wrong, begin)
    new = start.samples(first, wrong + 1) if stream else got  # what a stream lost may come later
    again = (before & (new - expected)).total() if other != stop else 0
    complete = start.ended or other == stop or own_end < first + len(start.steps) or own_end >= stop
    left = (expected if other == stop else expected - got).total() if complete else 0
    of = f"of the {count((before + expected).total(), 'sample')} of its epoch"
    after = f"after the resume at step {first}"
    if stream and start.of_step(first) == whole.of_step(0):
        yield "SS805", where, f"{after} the stream gives the samples of step 0 again"
    elif again:
        more = f", and {left} not at all" if left else ""
        yield "SS801", where, f"{after} {again} {of} are trained a second time{more}"
    elif other not in (None, stop):
        text = f"the epoch of step {wrong} has the order of the epoch that begins with step {other}"
        yield "SS803", where, text
    elif left:
        yield "SS806" if stream else "SS802", where, f"{after} {left} {of} are not trained"
    elif stream and (gone := whole.samples(first, end) - start.samples(first, end)):
        text = f"{gone.total()} samples that the whole run trains in steps {first} to {end - 1}"
        yield "SS806", where, f"{text} are not among those of the resumed stream"
    else:
        text = f"from step {wrong} on the samples come in another order than in the whole run"
        yield "SS817" if redrawn and wrong == begin else "SS803", where, text


def _rows(start: Attempt, step: int) -> Counter[int]:
    return Counter(row for event in start.steps[step - start.offset] for row in event["rows"])


def _epoch_like(resumed: Resumed, start: Attempt, wrong: int, begin: int) -> int | None:
    """Return the first step of another epoch that a resumed one repeats, if it does."""
    for first, stop in resumed.epochs(resumed.whole):
        steps = range(min(stop - first, start.offset + len(start.steps) - wrong))
        same = [start.of_step(wrong + n) == resumed.whole.of_step(first + n) for n in steps]
        if first != begin and same and all(same):
            return first
    return None


def _random(resumed: Resumed, start: Attempt) -> Iterator[_Coded]:
    """Look at a first step that differs though its state and samples do not."""
    for rank in range(len(start.ranks)):
        own, before = start.state(start.offset, rank), resumed.before(start, rank)
        if own is None or before is None or own["rows"] != before.get("rows"):
            return
        begins = [one.steps[0][rank]["random"].items() for one in (resumed.whole, resumed.chain[0])]
        seeded = sorted(name for name, _ in begins[0] & begins[1])
        names = [name for name in seeded if own["random"].get(name) != before["random"][name]]
        if names and (own["loss"], own["norm"]) != (before["loss"], before["norm"]):
            text = f"step {start.offset} begins with other random numbers ({', '.join(names)}): its"
            text += f" loss is {own['loss']:.6g}, and was {before['loss']:.6g} before the kill"
            yield "SS817", _where_loaded(start) or own.where, text + f" (rank {rank})" * bool(rank)
            return


def _counters(resumed: Resumed, start: Attempt) -> Iterator[_Coded]:
    """Compare the numbers in later checkpoints."""
    where = _where_loaded(start) or start.steps[0][0].where
    for save in start.saves:
        if save.event["apart"]:  # after which step a thread has written one is chance
            continue
        twin = next((one for one in resumed.whole.saves if one.is_twin(save)), save)
        # A counter sets an average's decay, and the average what is best.
        leaves = sorted(twin.event["leaves"].items(), key=lambda leaf: not isinstance(leaf[1], int))
        for name, right in leaves if save.step > start.offset else ():
            value = save.event["leaves"][name]
            average = isinstance(value, list) and _OF_AN_AVERAGE.search(name)
            plain = not isinstance(value, list | str) and not _OF_THE_SCHEDULE.search(name)
            if value == right or not (average or (plain and not _OF_TIME.search(name.lower()))):
                continue
            what = "is not" if average else f"is {value}, and not {right},"
            text = f"in the checkpoint of step {save.step} {name} {what} as in the whole run"
            yield "SS816" if average else "SS818", where, text
            return


def _end(resumed: Resumed, start: Attempt, *, explained: bool) -> Iterator[_Coded]:
    """Compare where the training ends."""
    where = _where_loaded(start) or start.steps[0][0].where
    ends, total = start.offset + start.taken, resumed.total
    beyond, short = ends > total, start.ended and ends < total and not explained
    if resumed.whole.ended and (beyond or short):
        how = "continues beyond" if beyond else f"ends after step {ends} of"
        text = f"resumed at step {start.offset}, it {how} the {total} steps of the whole run"
        yield "SS818", where, text


def _checkpoints(resumed: Resumed) -> Iterator[_Coded]:
    """Compare the checkpoints of the whole run with its weights, and with each other."""
    whole = resumed.whole
    files = [file for start in resumed.chain for file in start.loaded()]
    saves = [s for s in whole.saves if any(s.alike(f["names"], f["path"]) for f in files)]
    saves = [s for s in saves if not _NOT_THE_LAST.search(s.path.rpartition("/")[2])]
    if live := next((save for save in saves if save.event["changed"]), None):
        text = "from the live weights while the training changed them"
        yield "SS823", live.event.where, f"a thread wrote the one of step {live.step} {text}"
        return
    known = [(save, _step_of(whole, save)) for save in saves]
    for (one, first), (other, second) in pairwise(known):
        states = [whole.state(save.step) for save in (one, other)]
        weights = [state["weights"] for state in states if state is not None]
        if first is not None and first == second and len(weights) == 2 and weights[0] != weights[1]:
            text = f"the one of step {one.step} and that of step {other.step} both hold the weights"
            yield "SS822", other.event.where, f"{text} of step {first}"
            return
    for save, step in known:
        if step not in (None, save.step) and not save.event["apart"]:
            text = f"written after step {save.step}, it holds the weights of step {step}"
            yield "SS821", save.event.where, text
            return


def _step_of(whole: Attempt, save: Save) -> int | None:
    """Return the step whose weights a checkpoint holds, the nearest; None if there is none."""
    digests = save.digests
    for step in sorted(range(len(whole.steps) + 1), key=lambda n: (abs(n - save.step), n)):
        state, other = whole.state(step), whole.state(step - 1 if step else 1)
        if state is None or other is None:
            continue
        moving = [a for a, b in zip(state["weights"], other["weights"], strict=False) if a != b]
        if moving and sum(one in digests for one in moving) >= _ALMOST * len(moving):
            return step
    return None


def _on_others(resumed: Resumed, start: Attempt, number: int) -> Iterator[_Coded]:
    """Judge a start on another number of ranks."""
    at, whole = start.offset, resumed.whole
    if not start.steps or not at:
        return
    own, right = _rows(start, at).total(), _rows(whole, at).total()
    groups = [one.steps[at - one.offset][0]["groups"] for one in (start, whole)]
    rates = [[group.get("lr") for group in one] for one in groups]
    on = f"on {count(number, 'rank')}"
    if own != right and rates[0] == rates[1]:
        text = f"resumed {on} instead of {len(whole.ranks)}, a step trains {own} samples instead of"
        text += f" {right} with the same learning rate, {_plain(rates[0])}"
        yield "SS833", _first_of(start, "loader_made"), text
    elif own == right and not resumed.unsteady("rows"):
        for code, where, text in _data(resumed, start):  # no state makes up for another sampler
            yield code.replace("SS817", "SS803"), where, f"{on}: {text}"


def _torn(resumed: Resumed) -> Iterator[_Coded]:
    """Judge a start from the first half of a checkpoint: an error is right, or an older one."""
    torn, killed = resumed.torn, resumed.chain[0]
    if torn is None or not torn.steps:
        return
    begins = torn.steps[0][0]["weights"]
    states = [killed.state(step) for step in range(1, killed.taken + 1)]
    if any(state is not None and state["weights"] == begins for state in states):
        return
    anew = begins == resumed.whole.steps[0][0]["weights"]
    how = "from scratch" if anew else "with weights that no step had"
    text = f"of the checkpoint of step {killed.taken} only the first half was left, as of a kill "
    text += f"during the write: the training began {how}, and no error was raised"
    yield "SS824", _where_loaded(torn) or _where_loaded(resumed.chain[1]), text


def _first_of(start: Attempt, kind: str) -> str:
    event = start.ranks[0].first(kind)
    return event.where if event is not None else ""


def _where_loaded(start: Attempt) -> str:
    """Return the line that loads the checkpoint."""
    files: list[Event] = start.loaded()
    return files[-1].where if files else ""


def _where(start: Attempt, kind: str) -> str:
    """Return the line that loads a part of the state, or should: where the part is made."""
    loads = start.loaded("model" if kind in ("weights", "buffers") else kind)
    made = _first_of(start, _MADE.get(kind, ""))
    return (loads[-1].where if loads else "") or made or _where_loaded(start)


def _plain(numbers: Any) -> str:
    some = [f"{one:.4g}" if isinstance(one, int | float) else str(one) for one in numbers]
    return ", ".join(dict.fromkeys(some))
