"""Rules about files: who writes, saves, loads and downloads what."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import Found, NotSeen, Severity, replaced, rule
from samestep.scripts.checking.seen import E, Seen, asks_for_gpu


def by_line(
    seen: Seen, kind: type[E], wanted: Callable[[E], bool] = lambda _event: True
) -> dict[str, dict[int, list[E]]]:
    """Return each rank's events of a kind that are wanted, by the user's line."""
    lines: dict[str, dict[int, list[E]]] = defaultdict(lambda: defaultdict(list))
    for rank in seen.ranks:
        for event in rank.of(kind):
            if event.where and wanted(event):
                lines[event.where][rank.rank].append(event)
    return lines


def named(ranks: Iterable[int]) -> str:
    """Return some ranks as a sentence has them: rank 1; ranks 0 and 1; ranks 0, 1 and 2."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def on_rank_0(seen: Seen, where: str) -> str:
    """Return a remedy that lets only rank 0 run a line: a diff, if nothing else depends on it."""
    line = seen.line(where)
    assigned = re.match(r"([\w.]+) *=[^=]", line)
    uses = f", and whatever uses `{assigned[1]}`" if assigned else ""
    if not line or line.count("(") != line.count(")") or uses or line.startswith("with "):
        return f"Let only rank 0 do this{uses}: `if dist.get_rank() == 0:`."
    inner = f"+ if dist.get_rank() == 0:\n+     {line}"
    return f"- {line}\n{inner}"


def _turn(seen: Seen, rank: int, event: ev.Event) -> int:
    """Return a rank's number of collectives before an event: ranks that differ took turns."""
    return sum(call.time <= event.time for call in seen.ranks[rank].of(ev.CollectiveCalled))


@rule("SS501")
def one_file(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find files that were emptied by several ranks, or that each rank appends to."""
    reported: set[str] = set()
    modes: tuple[tuple[ev.FileMode, Severity | None], ...]
    modes = ("w", None), ("a", "advice"), ("rename", "advice")
    for mode, severity in modes:
        writers: dict[str, dict[int, ev.FileWritten]] = defaultdict(dict)
        for rank in seen.ranks:
            for event in rank.of(ev.FileWritten):
                if event.mode == mode:
                    writers[event.path].setdefault(rank.rank, event)
        lines: dict[str, list[str]] = defaultdict(list)
        for path, events in writers.items():
            turns = {_turn(seen, rank, event) for rank, event in events.items()}
            take_turns = mode == "a" and len(turns) == len(events)
            if len(events) > 1 and not take_turns:
                lines[next(iter(events.values())).where].append(path)
        for where, paths in lines.items():
            if where in reported:
                continue
            reported.add(where)
            events = writers[paths[0]]
            others = {event.where for event in events.values()} - {where}
            does = {"w": "write", "a": "append to", "rename": "replace"}[mode]
            more = f" and {len(paths) - 1} other files" if len(paths) > 1 else ""
            also = f"; the other line is {', '.join(sorted(others))}" if others else ""
            text = f"{named(events)} {does} {paths[0]}{more}{also}"
            yield Found(where, text, on_rank_0(seen, where), severity)


@rule("SS502")
def other_rank_saves(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find lines that save tensors on some ranks, and never on rank 0."""
    lines = by_line(seen, ev.FileSaved)
    if not lines:
        yield NotSeen("nothing was saved with torch.save")
    if seen.ranks[0].steps < max(rank.steps for rank in seen.ranks):
        yield NotSeen("rank 0 came to its end before it could save")
        return
    for where, ranks in lines.items():
        tensors = max(event.tensors for events in ranks.values() for event in events)
        paths = [event.path for events in ranks.values() for event in events if event.path]
        # What each rank but 0 saves are parts: of a pipeline, of experts.
        alone = len(ranks) == 1 or len(set(paths)) == 1
        if 0 not in ranks and tensors and paths and alone:
            text = f"{named(ranks)} saves {tensors} tensors to {paths[0]}; rank 0 saves nothing "
            text += "here"
            remedy = "Let rank 0 save: `if dist.get_rank() == 0:`."
            yield Found(where, text, remedy)


@rule("SS509")
def saves_some_shards(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find weights of which each rank has a part, and fewer ranks save theirs than there are."""
    saves = [(r.rank, e) for r in seen.ranks for e in r.of(ev.WeightsSaved) if e.parts > 1]
    ranks, parts = {rank for rank, _ in saves}, max((e.parts for _, e in saves), default=1)
    if 0 < len(ranks) < parts and seen.complete:
        event = saves[0][1]
        text = f"the weights of {event.model} are cut into {parts} parts, and only {named(ranks)} "
        text += f"{'saves one' if len(ranks) == 1 else 'save one each'}"
        remedy = "Save on every rank by `torch.distributed.checkpoint`, or the whole: "
        remedy += "`get_model_state_dict` with `StateDictOptions(full_state_dict=True)`."
        yield Found(event.where, text, remedy)


@rule("SS503", least_ranks=1)
def wrapped_names(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find saved state dicts in which all names begin with a wrapper's."""
    is_wrapped = seen.any(ev.ModelWrapped)
    for where, ranks in by_line(seen, ev.FileSaved).items():
        saves = (event.wrapped for events in ranks.values() for event in events)
        names: list[str] = next(filter(None, saves), [])
        # An average of weights also calls its copy `module`: only DDP's own is meant.
        if names and (is_wrapped or names[0].startswith("_orig_mod.")):
            line = seen.line(where)
            inner = "module" if names[0].startswith("module.") else "_orig_mod"
            call = ".state_dict()"
            better = line.replace(call, f".{inner}{call}") if line.count(call) == 1 else line
            remedy = replaced(line, better, f"Save the model inside: `model.{inner}{call}`.")
            yield Found(where, f"the names are {', '.join(names[:2])}, …", remedy)


@rule("SS504")
def no_map_location(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find state dicts that ranks other than 0 load, without where to."""
    loads = by_line(seen, ev.FileLoaded, lambda load: load.own)
    if not loads:
        yield NotSeen("no checkpoint was loaded")
    # Where no GPU would ever be asked for, tensors come from the CPU and go there.
    severity: Severity | None = None if asks_for_gpu(seen) else "advice"
    for where, ranks in loads.items():
        bare = [
            (rank, event)
            for rank, events in ranks.items()
            for event in events
            if event.map_location is None and any("." in name for name in event.names)
        ]
        if any(rank for rank, _ in bare):
            ranks_of_load = named({rank for rank, _ in bare})
            text = f"{ranks_of_load} load {bare[0][1].path} without map_location"
            remedy = 'Give `map_location="cpu"`, or the device of this rank.'
            better = _with_argument(seen, where, 'map_location="cpu"')
            yield Found(where, text, better or remedy, severity)


@rule("SS505", least_ranks=1)
def arbitrary_pickle(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find files loaded with weights_only=False, of those that this run has not itself saved."""
    saved = {event.path for event in seen.any(ev.FileSaved)}
    saved |= {event.path for event in seen.any(ev.FileWritten)}
    loads = by_line(seen, ev.FileLoaded, lambda load: load.own and load.weights_only is False)
    for where, ranks in loads.items():
        paths = {event.path for events in ranks.values() for event in events} - saved
        if paths:
            line = seen.line(where)
            better = line.replace("weights_only=False", "weights_only=True")
            words = "Load with `weights_only=True`, and save only tensors and plain values."
            remedy = replaced(line, better, words)
            yield Found(where, f"{min(paths)} is loaded with weights_only=False", remedy)


@rule("SS506")
def all_download(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find addresses that several ranks ask for, none after the others."""
    asking: dict[str, dict[int, ev.FileFetched]] = defaultdict(dict)
    for rank in seen.ranks:
        for event in rank.of(ev.FileFetched):
            asking[event.what].setdefault(rank.rank, event)
    reported: set[str] = set()
    for what, firsts in asking.items():
        turns = {rank: _turn(seen, rank, event) for rank, event in firsts.items()}
        at_once = [rank for rank, number in turns.items() if number == min(turns.values())]
        event = firsts[at_once[0]]
        if len(at_once) > 1 and event.where not in reported:
            reported.add(event.where)
            fetched = event.fetched
            does = "ask for" if fetched else "call"
            there = "" if fetched else ", which found its files here and would not elsewhere"
            text = f"{named(at_once)} {does} {what} with no collective in between{there}"
            remedy = "Let rank 0 download first: `if dist.get_rank() == 0: …`, then "
            remedy += "`dist.barrier()`, and then the others."
            yield Found(event.where, text, remedy, None if fetched else "advice")


@rule("SS507")
def all_track(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find trackers that several ranks start alike."""
    for where, ranks in by_line(seen, ev.TrackerStarted).items():
        asked = [events[0].asked for events in ranks.values()]
        off = any(given.get("mode") in ("disabled", "shared") for given in asked)
        # Runs in a group, or with other names on each rank, are meant to be several.
        if len(ranks) > 1 and not off and all(given == asked[0] for given in asked):
            if "group" in asked[0]:
                continue
            name = next(iter(ranks.values()))[0].name
            # What the other ranks log later needs a run, too.
            muted = _with_argument(seen, where, 'mode=None if dist.get_rank() == 0 else "disabled"')
            remedy = muted if name == "wandb.init" and muted else on_rank_0(seen, where)
            yield Found(where, f"{named(ranks)} start {name}", remedy)


@rule("SS508")
def all_show(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find bars that several ranks show at the same place."""
    for where, ranks in by_line(seen, ev.BarShown, lambda bar: not bar.disabled).items():
        positions = {events[0].position for events in ranks.values()}
        if len(ranks) > 1 and len(positions) == 1:
            text = f"{named(ranks)} show a bar of {next(iter(ranks.values()))[0].name}"
            argument = "disable=dist.get_rank() != 0"
            remedy = _with_argument(seen, where, argument) or f"Give it `{argument}`."
            yield Found(where, text, remedy)


def _with_argument(seen: Seen, where: str, argument: str) -> str:
    """Return a diff that adds an argument to the only call of a line, if there is only one."""
    line = seen.line(where)
    name = next((name for name in ("torch.load(", "wandb.init(") if name in line), "tqdm(")
    if line.count(name) != 1:
        return ""
    begin = line.index(name) + len(name)
    closed = (line[begin:end] for end in range(begin, len(line)) if line[end] == ")")
    given = next((text for text in closed if text.count("(") == text.count(")")), None)
    if given is None:
        return ""
    more = f"{given.rstrip(', ')}, " if given else ""
    return f"- {line}\n+ {line[:begin]}{more}{argument}{line[begin + len(given) :]}"
