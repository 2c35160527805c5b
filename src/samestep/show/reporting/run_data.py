"""Read a run as far as it can be read: it may be running, killed, or damaged."""

import contextlib
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep.base.run.directory import no_run, read_summary, seconds_since_sign
from samestep.base.run.files import read_object
from samestep.base.run.records import SYSTEM, Record, RecordFile, metric_values
from samestep.base.run.step_rows import CompactRecords, StepRows
from samestep.base.words import duration

TRAIN_LOSS = "train_loss"
_PLANNED = (
    *("num_samples", "parameters", "accumulate"),
    *("world_size", "num_nodes", "device", "backend", "threads"),
)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run's directory tells."""

    path: Path
    recipe: str  # its name; empty if nothing tells
    status: str  # how it ended, or that it has not
    records: tuple[Record, ...] = ()
    """As one uninterrupted run would have written them; of `step` records in a row only the last,
    since all of them are in `steps`."""
    steps: StepRows = field(default_factory=StepRows)  # all `step` records
    plan: Record = field(default_factory=dict)  # the latest `start` record; empty if there is none
    settings: Mapping[str, object] | None = None
    """Settings and the recipe's options; None if the file cannot be read."""
    own_loop: bool = False
    """Whether a loop of the user's own trained it, which has only settings of its own."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Of where it ran: ranks, device, versions, and what its own recipe file was."""
    weights: Mapping[int, str] = field(default_factory=dict)
    """Step → SHA-256 of the weights after it, where that is recorded."""
    result: Mapping[str, Any] = field(default_factory=dict)  # what is in result.json
    environment: Mapping[str, Any] = field(default_factory=dict)  # what is in environment.json
    problems: tuple[str, ...] = ()  # what is missing or cannot be read, a sentence each

    def of(self, event: str, split: str | None = None) -> Sequence[Record]:
        """Return the records of one kind, of evaluations those of one split."""
        if event == "step":
            return self.steps
        records = self._by_event.get(event, ())
        return [r for r in records if split is None or r.get("split") == split]

    @cached_property
    def _by_event(self) -> dict[str, list[Record]]:
        by_event: dict[str, list[Record]] = {}
        for record in self.records:
            by_event.setdefault(record["event"], []).append(record)
        return by_event

    @cached_property
    def system(self) -> list[Record]:
        """The samples that a tracker's process took of the machine."""
        with contextlib.suppress(OSError):
            records = RecordFile(self.path / SYSTEM).read_all()
            return [record for record in records if isinstance(record.get("step"), int)]
        return []

    def metrics(self) -> list[str]:
        """Return the names of the run's validation metrics, and its training loss."""
        evaluated = [
            name
            for record in self.of("evaluation", "validation")
            for name, value in metric_values(record).items()
            if isinstance(value, int | float)
        ]
        trained = [TRAIN_LOSS] if self.of("epoch") or self.of("step") else []
        return [*dict.fromkeys(evaluated), *trained]

    @cached_property
    def best(self) -> Mapping[str, Any]:
        """The metric, the value and the epoch of the best evaluation, as far as they are known."""
        best = self.result.get("best")
        if self.status != "running" and isinstance(best, dict):  # or it is of an earlier attempt
            return best
        records = self.of("evaluation", "validation")
        usual = "accuracy" if any("accuracy" in r for r in records) else "loss"
        metric = str(self.plan.get("monitor") or usual)
        pick = min if self.smaller_is_better(metric) or metric == "loss" else max
        values = (r for r in records if isinstance(r.get(metric), int | float))
        at = pick(values, key=lambda r: r[metric], default={})
        return {"metric": metric, "value": at.get(metric), "epoch": at.get("epoch")}

    @cached_property
    def best_evaluation(self) -> Record:
        """The evaluation with the best value; empty if none is known."""
        metric, value, epoch = (self.best.get(key) for key in ("metric", "value", "epoch"))
        records = self.of("evaluation", "validation") if value is not None else []
        same = (r for r in records if r.get("epoch") == epoch and r.get(str(metric)) == value)
        return next(same, {})

    def smaller_is_better(self, metric: str) -> bool | None:
        """Whether a metric is to fall, by --mode or by the recipe; None if the run does not say."""
        settings, lower = self.settings or {}, self.plan.get("lower_is_better")
        if settings.get("monitor") == metric and settings.get("mode") in ("min", "max"):
            return settings["mode"] == "min"
        return metric in (*lower, TRAIN_LOSS) if lower is not None else None


def read_run(path: Path) -> RunData:
    """Read a run's directory; raise UserError if there is no run at all."""
    if not (path / "events.jsonl").is_file() and not (path / "settings.toml").is_file():
        raise no_run(path)
    problems: list[str] = []
    records, steps = _records(path / "events.jsonl", problems)
    starts = [record for record in records if record["event"] == "start"]
    plan = starts[-1] if starts else {}
    result, environment = (read_object(path / name) for name in ("result.json", "environment.json"))
    table = _settings(path / "settings.toml", problems)
    if records and records[-1]["event"] == "stop" and not result:
        problems.append("result.json is missing or damaged: no test results")
    if not starts:
        problems.append("no start record: batch size and steps per epoch are not known")
    sizes = dict.fromkeys(start["world_size"] for start in starts)
    if len(sizes) > 1:
        problems.append(f"it ran on {', then '.join(map(str, sizes))} ranks: its numbers mix them")
    settings = None
    if table is not None:  # settings and options together, as the command line has them
        own = table["options"] if isinstance(table.get("options"), dict) else {}
        settings = {key: table[key] for key in table if key not in ("recipe", "options")}
        settings |= {key: own[key] for key in own if key not in settings}
    name = plan.get("recipe") or result.get("recipe") or (table or {}).get("recipe") or ""
    return RunData(
        path=path,
        recipe=Path(str(name)).stem,
        status=_status(path),
        records=tuple(records),
        steps=steps,
        plan=plan,
        settings=settings,
        own_loop=table is not None and "recipe" not in table,
        facts=_facts(path, plan, environment, problems),
        weights=_weights(records, result),
        result=result,
        environment=environment,
        problems=tuple(problems),
    )


def _records(file: Path, problems: list[str]) -> tuple[list[Record], StepRows]:
    """Return the records that can be read, those that were superseded left out."""
    lines = RecordFile(file, checked=True)
    try:
        file.stat()
        compact = CompactRecords(lines, file.parent)
    except OSError:
        problems.append("events.jsonl is missing: nothing is known about its training")
        return [], StepRows()
    if lines.torn:
        problems.append("the last line of events.jsonl is incomplete, and left out")
    if damaged := lines.damaged:
        lines_named = "line" if len(damaged) == 1 else "lines"
        shown = ", ".join(map(str, damaged[:5])) + (" …" if len(damaged) > 5 else "")
        problems.append(f"events.jsonl is damaged in {lines_named} {shown}, left out")
    if not (records := compact.in_short()):
        problems.append("events.jsonl holds no record yet")
    return records, compact.steps()


def _settings(file: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problem = "missing" if isinstance(error, OSError) else "damaged"
        problems.append(f"settings.toml is {problem}: its settings are not known")
    return None


def _weights(records: list[Record], result: dict[str, Any]) -> dict[int, str]:
    """Return the digests of weights that checkpoints and the result tell."""
    digests = [r for r in records if r["event"] == "checkpoint"]
    ends = [r["step"] for r in records if r["event"] == "stop" and isinstance(r.get("step"), int)]
    if ends and result.get("steps") == ends[-1]:  # the result is of the latest attempt
        digests.append({"step": ends[-1], "weights_sha256": result.get("weights_sha256")})
    return {
        r["step"]: digest for r in digests if isinstance(digest := r.get("weights_sha256"), str)
    }


def _facts(
    path: Path, plan: Record, environment: dict[str, Any], problems: list[str]
) -> dict[str, object]:
    if not environment:
        problems.append("environment.json is missing or damaged: versions and machine are unknown")
    facts = {name: plan[name] for name in _PLANNED if name in plan}
    # The sizes are in settings.toml too; where that is gone, the plan still has them.
    sizes = {"batch_size": "global_batch_size", "micro_batch_size": "micro_batch_size"}
    facts |= {name: plan[key] for name, key in sizes.items() if plan.get(key) is not None}
    facts |= {name: environment[name] for name in ("host", "cores_usable") if name in environment}
    versions = environment.get("versions")
    facts |= versions if isinstance(versions, dict) else {}
    recipe_file = path / "recipe.py"
    if recipe_file.is_file():
        facts["recipe.py"] = f"sha256 {hashlib.sha256(recipe_file.read_bytes()).hexdigest()[:8]}…"
    return facts


def _status(path: Path) -> str:
    summary, _ = read_summary(path)
    if summary.state != "killed":
        ended = f"{summary.state} ({summary.reason or 'no reason given'})"
        return summary.state if summary.state == "running" else ended
    if (age := seconds_since_sign(path)) is None:
        return "not begun"
    return f"no end recorded, last written {duration(age)} ago: killed, or running elsewhere"
