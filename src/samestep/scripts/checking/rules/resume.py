"""Rules about a training that was killed and resumed: what it reads, its state, its checkpoints.

They judge a `Resumed`, not one run. The state that a start begins with is compared with the one
before the kill; what follows, with the same steps of the whole run.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from samestep.base.words import count
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import RULES, Found, NotSeen, rule
from samestep.scripts.checking.seen import Seen
from samestep.scripts.checking.starts import Attempt, Resumed, SeenResumed

_PARTS: dict[ev.StatePart, tuple[str, ...]] = {
    "weights": ("SS811", "weights", "model"),
    "buffers": ("SS811", "buffers", "model"),
    "optimizer": ("SS812", "optimizer's state", "optimizer", "optimizer made"),
    "scale": ("SS815", "loss scale", "scaler made"),
    "copies": ("SS816", "average of the weights", "copy made"),
}
"""Of each part of the state its code, its name, and where the line is at which it is loaded."""
_OF_THE_SCHEDULE = re.compile(r"param_groups|_last_lr|last_epoch|_step_count|sched|\blr\b")
_OF_TIME = re.compile(r"time|second|elapsed|date|speed|duration|throughput|per_s|random|rng|seed")
_OF_AN_AVERAGE = re.compile(r"ema|shadow|average|teacher", re.IGNORECASE)
_NOT_THE_LAST = re.compile(r"(best|init|teacher|pretrain|ema|swa|average)[^/]*$", re.IGNORECASE)
_ROUNDING = 1e-4
"""By how much, relatively, the loss of the same step may differ: weights may be laid out anew."""
_CODES = [f"SS8{n:02}" for n in (*range(1, 8), *range(11, 19), *range(21, 26), *range(31, 35))]
_DIFF = re.compile(r"```diff\n(.+?)```", re.DOTALL)


class _Fault(NamedTuple):
    code: str
    where: str
    seen: str


def mistakes(resumed: Resumed) -> Iterator[_Fault]:
    """Yield the faults of a resume."""
    wrong_files = [*_checkpoints(resumed)]
    yield from wrong_files
    # What follows from a wrong file, or from a finding of an earlier start, is left out.
    known = {code for code in _CODES if wrong_files and code < "SS823"}
    right_so_far = True
    for before, start in pairwise(resumed.chain):
        wrong = [*_start(resumed, before, start, follows=right_so_far)]
        if before.offset and (data := [fault for fault in wrong if fault.code < "SS81"]):
            text = "the first resume reads what the whole run does, the second not: "
            first = data[0]._replace(code="SS804", seen=text + data[0].seen)
            wrong = [first, *(fault for fault in wrong if fault not in data)]
        right_so_far &= all(fault.code == "SS818" for fault in wrong)
        yield from (fault for fault in wrong if fault.code not in known)
        known |= {fault.code for fault in wrong}
    for start in resumed.others:
        yield from _on_others(resumed, start)
    yield from _torn(resumed)


def _of(code: str, seen: Seen) -> Iterator[Found | NotSeen]:
    assert isinstance(seen, SeenResumed)
    resumed = seen.resumed
    example = "".join(_DIFF.findall(RULES[code].page)).replace("-    ", "-").replace("+    ", "+")
    for fault in mistakes(resumed):
        if fault.code == code:
            yield Found(fault.where, fault.seen, f"For example:\n{example}")
    if code < "SS81" and resumed.unsteady("rows"):
        yield NotSeen("two starts read other samples by themselves, or in another order")


for _code in _CODES:
    rule(_code, least_ranks=1)(functools.partial(_of, _code))


def _start(resumed: Resumed, before: Attempt, start: Attempt, *, follows: bool) -> Iterator[_Fault]:
    """Judge one start that resumes; `follows`: whether all before it was as in the whole run."""
    whole, files, line = resumed.whole, start.loaded(), _line(start)
    if not start.steps:
        if before.end < whole.end:
            text = f"resumed after step {before.end} of {whole.end}, it took no step"
            yield _Fault("SS818", line, text)
        return
    if start.offset == 0 and before.end:
        read = f"though it read {files[-1].path}" if files else "and read no checkpoint"
        text = f"resumed after step {before.end}, it began with the weights of step 0 again, {read}"
        yield _Fault("SS831", line, text)
        return
    names = [word.partition("=")[2] or word for word in resumed.words]
    if not any(file.path.startswith(name) for file in files for name in names):  # by the user
        yield from _older(before, start)
    yield from _gone(start)
    wrong = [*_state(whole, before, start)]
    if follows and not any(fault.code == "SS821" for fault in wrong):
        wrong += _schedule(whole, start)
        wrong += [] if resumed.unsteady("rows") else _data(whole, start)
    short = not wrong and start.seen.complete and start.end < whole.end
    wrong = wrong or [*_random(resumed, start)]
    yield from wrong
    yield from _counters(whole, start) if follows and not wrong else ()
    if follows and whole.seen.complete and (short or start.end > whole.end):
        ends = f"ends after step {start.end} of" if short else "continues beyond"
        text = f"resumed at step {start.offset}, it {ends} the {whole.end} steps of the whole run"
        yield _Fault("SS818", line, text)


def _gone(start: Attempt) -> Iterator[_Fault]:
    """Look for a checkpoint that is changed before the first step, if not by the same one anew."""
    again = [save for save in start.saves if save.step == start.offset]
    for gone in start.seen.any(ev.CheckpointGone)[:1]:
        parts = {*start.loaded()[-1].names}
        if not any(save.path == gone.path and {*save.leaves} == parts for save in again):
            text = f"{gone.path}, the checkpoint of step {start.offset}, was removed or written "
            text += "over before the first step after the resume: a kill now loses the training"
            yield _Fault("SS834", again[0].where if again else _line(start), text)


def _older(before: Attempt, start: Attempt) -> Iterator[_Fault]:
    """Look for a checkpoint that is newer than the one that was taken."""
    newest = next((save for save in _resumable(before, start)[::-1] if not save.apart), None)
    if newest is not None and start.offset < newest.step <= before.end:
        there = f"there was a checkpoint of step {newest.step}, {newest.path or 'of no name'}"
        text = f"{there}; it took the one of step {start.offset}, {start.loaded()[-1].path}"
        yield _Fault("SS825", _line(start), text)


def _resumable(start: Attempt, *later: Attempt) -> list[ev.CheckpointSaved]:
    """Return a start's saves that later ones could load, by their parts or their path."""
    files = [file for other in later for file in other.loaded()]
    parts, paths = [{*file.names} for file in files], [file.path for file in files]
    return [
        save
        for save in start.saves
        if not _NOT_THE_LAST.search(path := save.path)
        and ({*save.leaves} in parts or (path and any(p.startswith(path) for p in paths)))
    ]


def _state(whole: Attempt, before: Attempt, start: Attempt) -> Iterator[_Fault]:
    """Compare the state that a start begins with, with that before the kill."""
    at = start.offset
    for part, (code, name, *places) in _PARTS.items():
        # DDP sends rank 0's buffers to all in the next forward.
        ranks = range(1 if part == "buffers" else start.seen.world_size)
        wrong = {rank: pair for rank in ranks if (pair := start.changed(part, rank)) is not None}
        where = _line(start, *places)
        if wrong and 0 not in wrong:
            text = f"rank 0 has the {name} of before the kill, and rank {min(wrong)} has not"
            yield _Fault("SS832", where, f"resumed at step {at}, {text}")
        elif wrong:
            text = _difference(whole, at, part, *wrong[0])
            files = [s for s in before.saves if s.step == at and {*wrong[0][0]} <= _digests(s)]
            if part == "weights" and files:  # it restores what the file holds
                text = f"the checkpoint of step {at} has other weights than the training: {text}"
                yield _Fault("SS821", files[-1].where, text)
                return  # what the file holds says nothing about the rest
            yield _Fault(code, where, text)


def _difference(
    whole: Attempt, at: int, part: ev.StatePart, own: list[Any], right: list[Any]
) -> str:
    """Describe the difference of a part of the state from its value before the kill."""
    name = _PARTS[part][1]
    if part == "scale":
        return f"the {name} is {_plain(own)}, and was {_plain(right)}"
    if part == "copies":
        return f"an {name}, or another model that the steps change, is not that of step {at}"
    if len(own) != len(right):
        return f"the {name} begins with {len(own)} tensors, and had {len(right)}"
    differ = [n for n, (a, b) in enumerate(zip(own, right, strict=True)) if a != b]
    text = f"{len(differ)} of {count(len(right), 'tensor')} of the {name} "
    if part == "weights" and (names := whole.seen.ranks[0].first(ev.WeightNames)):
        text += f"({', '.join([names.names[n] for n in differ[:3]])}) "
    text += f"{'is' if len(differ) == 1 else 'are'} not as at step {at}"
    begin = getattr(whole.at(0), part)
    anew = sum(own[n : n + 1] == begin[n : n + 1] for n in differ)
    return text + (f"; {anew} as before the first step" if anew and part != "optimizer" else "")


def _schedule(whole: Attempt, start: Attempt) -> Iterator[_Fault]:
    """Compare the numbers of the optimizers' groups, step by step."""
    step = start.differs_from(whole, "groups")
    if step is None:
        return
    rates, right = _rates(start, step), _rates(whole, step)
    if rates == right:
        groups = zip(start.at(step).groups, whole.at(step).groups, strict=False)
        name = next((k for a, b in groups for k in b if a.get(k) != b[k]), "groups")
        text = f"from step {step} on the optimizer's {name} is not as in the whole run"
        yield _Fault("SS812", _line(start, "optimizer", "optimizer made"), text)
        return
    text = f"the learning rate of step {step} is {_plain(rates)} after the resume, {_plain(right)} "
    text += "in the whole run"
    later, right_later = ([_rates(run, n) for n in run.span if n > step] for run in (start, whole))
    is_ahead = rates in right_later and right not in later
    text += ", which has it in a later step" if is_ahead else ""
    where = _line(start, "schedule made", "optimizer", "optimizer made")
    yield _Fault("SS814" if is_ahead else "SS813", where, text)


def _rates(start: Attempt, step: int) -> list[float]:
    return [rate for group in start.at(step).groups for rate in group.get("lr", ())]


def _data(whole: Attempt, start: Attempt) -> Iterator[_Fault]:
    """Compare the samples, step by step, and say what became of them."""
    first, wrong = start.offset, start.differs_from(whole, "rows")
    if wrong is None:
        return
    where, code = _line(start, "loader made"), "SS803"
    if whole.numbered and start.numbered and whole.samples(wrong) == start.samples(wrong):
        text = f"step {wrong} trains the samples of the whole run with other values"
        yield _Fault("SS807", where, text)
        return
    (begin, stop), (_, own_stop) = whole.epoch_of(wrong, whole), start.epoch_of(wrong, whole)
    since, end = max(begin, first), start.span.stop
    before, expected = whole.samples(begin, since), whole.samples(since, stop)
    trained, stream = start.samples(since, own_stop), start.at(wrong).iterable
    other = _epoch_like(whole, start, wrong, begin)
    early = start.samples(first, wrong + 1) if stream else trained  # a lost one may come later
    twice = 0 if other == stop else (before & (early - expected)).total()
    is_known = start.seen.complete or other == stop or own_stop < end or own_stop >= stop
    left = expected if other == stop else expected - trained
    num_left = left.total() if is_known else 0
    of = f"of the {count((before + expected).total(), 'sample')} of its epoch"
    after = f"after the resume at step {first}"
    if stream and start.samples(first) == whole.samples(0):
        code, text = "SS805", f"{after} the stream gives the samples of step 0 again"
    elif twice:
        code, text = "SS801", f"{after} {twice} {of} are trained a second time"
        text += f", and {num_left} not at all" if num_left else ""
    elif other not in (None, stop):
        text = f"the epoch of step {wrong} has the order of the epoch that begins with step {other}"
    elif num_left:
        code = "SS806" if stream else "SS802"
        text = f"{after} {num_left} {of} are not trained"
    elif stream and (gone := whole.samples(first, end) - start.samples(first, end)):
        last = min(end, len(whole.steps)) - 1
        code, text = "SS806", f"{gone.total()} samples that the whole run trains in steps {first} "
        text += f"to {last} are not among those of the resumed stream"
    else:
        redrawn = start.at(wrong).random != whole.at(wrong).random and wrong == begin
        code = "SS817" if redrawn else "SS803"
        text = f"from step {wrong} on the samples come in another order than in the whole run"
    yield _Fault(code, where, text)


def _epoch_like(whole: Attempt, start: Attempt, wrong: int, begin: int) -> int | None:
    """Return the first step of another epoch that a resumed one repeats, if it does."""
    for first, stop in whole.epochs(whole):
        steps = range(min(stop - first, start.span.stop - wrong))
        same = [start.samples(wrong + n) == whole.samples(first + n) for n in steps]
        if first != begin and same and all(same):
            return first
    return None


def _random(resumed: Resumed, start: Attempt) -> Iterator[_Fault]:
    """Look at a first step that differs though its state and samples do not."""
    for rank in range(start.seen.world_size):
        own, before = start.begins(rank)
        if not isinstance(own, ev.StepBegun) or not isinstance(before, ev.StepBegun):
            return
        if own.rows != before.rows:
            return
        starts = resumed.whole, resumed.chain[0]
        whole, killed = (run.steps[0][rank].random.items() for run in starts)
        seeded = sorted(name for name, _ in whole & killed)
        names = [name for name in seeded if own.random.get(name) != before.random[name]]
        loss, then = (math.nan if step.loss is None else step.loss for step in (own, before))
        losses = f"its loss is {loss:.6g}, and was {then:.6g} before the kill"
        losses += f" (rank {rank})" if rank else ""
        if names and (own.loss, own.gradients) != (before.loss, before.gradients):
            text = f"step {start.offset} begins with other random numbers ({', '.join(names)})"
            yield _Fault("SS817", _line(start), f"{text}: {losses}")
            return
        apart = own.loss != before.loss and not math.isclose(loss, then, rel_tol=_ROUNDING)
        if apart and not names and not resumed.unsteady("loss"):
            text = f"step {start.offset} begins as before the kill, with the same samples, but "
            text += f"{losses}: something else that it depends on begins anew, such as a number in "
            yield _Fault("SS818", _line(start), f"{text}a variable or a generator of its own")
            return


def _counters(whole: Attempt, start: Attempt) -> Iterator[_Fault]:
    twins = {(save.step, save.where, *save.leaves): save.leaves for save in whole.saves[::-1]}
    for save in start.saves:
        right = twins.get((save.step, save.where, *save.leaves))
        if right is None or save.step == start.offset or save.apart:
            continue  # after which step a thread has written one is chance
        # A counter sets an average's decay, and the average what is best.
        for name in sorted(right, key=lambda name: not isinstance(right[name], int)):
            value = save.leaves[name]
            average = isinstance(value, list) and _OF_AN_AVERAGE.search(name)
            plain = not isinstance(value, list | str) and not _OF_THE_SCHEDULE.search(name)
            judged = average or (plain and not _OF_TIME.search(name.lower()))
            if judged and value != right[name]:
                what = "is not" if average else f"is {value}, and not {right[name]},"
                text = f"in the checkpoint of step {save.step} {name} {what} as in the whole run"
                yield _Fault("SS816" if average else "SS818", _line(start), text)
                return


def _checkpoints(resumed: Resumed) -> Iterator[_Fault]:
    """Compare the checkpoints of the whole run with its weights, and with each other."""
    whole, saves = resumed.whole, _resumable(resumed.whole, *resumed.chain)
    for save in saves:
        if save.changed:
            text = "from the live weights while the training changed them"
            yield _Fault("SS823", save.where, f"a thread wrote the one of step {save.step} {text}")
            return
    held = [whole.step_of(_digests(save), save.step) for save in saves]
    for (save, step), (later, later_step) in pairwise(zip(saves, held, strict=True)):
        states = [whole.state(s.step) for s in (save, later)]
        weights = {tuple(state.weights) for state in states if state is not None}
        if step is not None and step == later_step and len(weights) > 1:
            text = f"the one of step {save.step} and that of step {later.step} both hold the "
            yield _Fault("SS822", later.where, f"{text}weights of step {step}")
            return
    for save, step in zip(saves, held, strict=True):
        if step not in (None, save.step) and not save.apart:
            text = f"written after step {save.step}, it holds the weights of step {step}"
            yield _Fault("SS821", save.where, text)
            return


def _on_others(resumed: Resumed, start: Attempt) -> Iterator[_Fault]:
    at, whole = start.offset, resumed.whole
    if not start.steps or not at:
        return
    on = f"on {count(start.seen.world_size, 'rank')}"
    own, right = (run.samples(at, rows=True).total() for run in (start, whole))
    if own != right and _rates(start, at) == _rates(whole, at):
        text = f"resumed {on} instead of {whole.seen.world_size}, a step trains {own} samples "
        text += f"instead of {right} with the same learning rate, {_plain(_rates(whole, at))}"
        yield _Fault("SS833", _line(start, "loader made"), text)
    elif own == right and not resumed.unsteady("rows"):
        for fault in _data(whole, start):  # no state makes up for another sampler
            yield _Fault(fault.code.replace("SS817", "SS803"), fault.where, f"{on}: {fault.seen}")


def _torn(resumed: Resumed) -> Iterator[_Fault]:
    """Judge a start from the first half of a checkpoint: an error is right, or an older one."""
    torn, killed = resumed.torn, resumed.chain[0]
    if torn is None or not torn.steps:
        return
    if step := killed.step_of(torn.steps[0][0].weights, killed.end):
        return
    began = "with weights that no step had" if step is None else "from scratch"
    text = f"of the checkpoint of step {killed.end} only the first half was left, as of a kill "
    text += f"during the write: the training began {began}, and no error was raised"
    yield _Fault("SS824", _line(torn if torn.loaded() else resumed.chain[1]), text)


def _digests(save: ev.CheckpointSaved) -> set[int]:
    return {value[0] for value in save.leaves.values() if isinstance(value, list)}


def _line(start: Attempt, *places: str) -> str:
    """Return the line of the first place that is known, or where the file is loaded.

    A place is a kind of state, whose last load counts, or of an object, where the first is made.
    """
    rank = start.seen.ranks[0]
    lines = {f"{event.what} made": event.where for event in rank.of(ev.ObjectMade)[::-1]}
    lines |= {event.what: event.where for event in start.seen.any(ev.StateLoaded)}
    step = rank.first(ev.StepBegun)
    lines["step"] = step.where if step is not None else ""
    return next((line for place in (*places, "file", "step") if (line := lines.get(place))), "")


def _plain(numbers: Iterable[Any]) -> str:
    some = [f"{n:.4g}" if isinstance(n, int | float) else str(n) for n in numbers]
    return ", ".join(dict.fromkeys(some))
