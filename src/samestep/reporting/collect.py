"""Everything that a page shows, from run directories alone: read, and put in order."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UserError
from samestep.reporting import comparison_text
from samestep.reporting import facts as of_run
from samestep.reporting.charts import Lines, charts_of, left_out, phases_chart
from samestep.reporting.classes import ByClass, by_class
from samestep.reporting.comparison import Comparison, check_target, compare_runs
from samestep.reporting.pictures import Gallery, read_gallery
from samestep.reporting.run_data import RunData, read_run
from samestep.reporting.scaling import ScalingStudy, read_study
from samestep.reporting.series import Chart
from samestep.reporting.steps import RankByRank, StepTime, rank_by_rank, step_time
from samestep.reporting.table import Table, number, texts
from samestep.reporting.timeline import TimeLine, time_line
from samestep.run.records import Record

SYSTEM = "system.jsonl"


@dataclass(frozen=True, kw_only=True)
class RunPart:
    """What is shown of one run beside its curves."""

    name: str
    """A, B … among several runs; empty for a single one."""
    title: str
    recipe: str
    status: str
    tone: str
    """good, bad, running or unknown: how the status is marked."""
    facts: of_run.Pairs
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    step_time: StepTime | None
    phases: Chart | None
    ranks: RankByRank | None
    time_line: TimeLine | None
    classes: ByClass | None
    gallery: Gallery | None
    baselines: Table | None
    memory: str
    settings: tuple[Table, ...]
    environment: Table | None
    commands: of_run.Pairs

    @property
    def contents(self) -> list[tuple[str, str]]:
        """Its sections on the page: (anchor, title) of those that are there."""
        there = {
            ("time", "Time of a step"): self.step_time or self.phases,
            ("ranks", "Ranks"): self.ranks,
            ("timeline", "Time line"): self.time_line,
            ("classes", "Classes"): self.classes,
            ("pictures", "Pictures"): self.gallery,
            ("baselines", "Baselines"): self.baselines,
            ("settings", "Settings"): self.settings or self.environment,
            ("commands", "Commands"): self.commands,
        }
        return [section for section, found in there.items() if found]


@dataclass(frozen=True, kw_only=True)
class ChartGroup:
    """Charts of the runs of one recipe."""

    title: str
    charts: tuple[Chart, ...]
    left_out: int = 0
    """How many values have no chart."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What only several runs have: tables of what differs."""

    runs: Table
    settings: Table | None
    tables: tuple[Table, ...]
    verdicts: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page's whole content."""

    title: str
    runs: tuple[RunPart, ...] = ()
    groups: tuple[ChartGroup, ...] = ()
    beside: Beside | None = None
    studies: tuple[ScalingStudy, ...] = ()

    @property
    def charts(self) -> list[Chart]:
        """All charts that the page's script draws."""
        phases = [run.phases for run in self.runs if run.phases]
        return [*(chart for group in self.groups for chart in group.charts), *phases]

    @property
    def ended(self) -> bool:
        """Whether no run of it is going on."""
        return not any(run.tone == "running" for run in self.runs)


def collect(paths: Sequence[Path], target: float | None = None) -> Report:
    """Return what a page of some runs, or of scaling studies, shows.

    Args:
        paths: run directories, and files of `samestep scale --json`.
        target: with several runs, tell when their metric was first there.

    Raises:
        UserError: one is neither, or none is given.
    """
    check_target(target)
    if not paths:
        raise UserError("Name a run: samestep report runs/ID. Several are put side by side.")
    files = [path for path in paths if path.is_file()]
    studies = tuple(read_study(path) for path in files)
    folders = [path for path in paths if path not in files]
    if not folders:
        return Report(title=f"Scaling of {studies[0].recipe}", studies=studies)
    beside, runs, names = None, [read_run(folders[0])], [""]
    if len(folders) > 1:
        found = compare_runs(folders, target=target, any_recipe=True)
        beside, runs, names = _beside(found), found.runs, found.names
    named = zip(runs, names, strict=True)
    return Report(
        title=_title(runs),
        runs=tuple(_run_part(run, name, place) for place, (run, name) in enumerate(named)),
        groups=_groups(runs, names),
        beside=beside,
        studies=studies,
    )


def _title(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return runs[0].path.resolve().name
    recipes = list(dict.fromkeys(run.recipe or "unknown" for run in runs))
    return f"{len(runs)} runs of {', '.join(recipes)}"


def _groups(runs: Sequence[RunData], names: Sequence[str]) -> tuple[ChartGroup, ...]:
    """Return the charts, those of each recipe together: only they have the same axes."""
    lines = [Lines(run, _system_records(run.path)) for run in runs]
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    groups = []
    for place, recipe in enumerate(recipes):
        places = [n for n, run in enumerate(runs) if run.recipe == recipe]
        suffix = f"-{place + 1}" if place else ""
        charts = charts_of([lines[p] for p in places], [names[p] for p in places], places, suffix)
        title = (recipe or "unknown recipe") if len(recipes) > 1 else ""
        more = left_out([lines[p] for p in places])
        groups.append(ChartGroup(title=title, charts=tuple(charts), left_out=more))
    return tuple(groups)


def _system_records(path: Path) -> list[Record]:
    """Return the samples that a tracker's process took of the machine."""
    try:
        lines = (path / SYSTEM).read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def _run_part(run: RunData, name: str, place: int) -> RunPart:
    notes = texts(run.plan.get("notes"))
    for event in ("resume", "evaluation", "baselines"):
        notes += [text for record in run.of(event) for text in texts(record.get("problems"))]
    chart = phases_chart(run, place, f"-{name.lower()}" if name else "")
    return RunPart(
        name=name,
        title=str(run.path),
        recipe=run.recipe or "recipe unknown",
        status=run.status,
        tone=_tone(run.status),
        facts=of_run.header(run),
        problems=tuple(map(_sentence, run.problems)),
        notes=tuple(dict.fromkeys(notes)),
        step_time=step_time(run),
        phases=chart,
        ranks=rank_by_rank(run),
        time_line=time_line(run),
        classes=by_class(run),
        gallery=read_gallery(run.path),
        baselines=of_run.baselines_table(run),
        memory=_memory(_system_records(run.path)),
        settings=of_run.settings_tables(run),
        environment=of_run.environment_table(run),
        commands=of_run.commands(run),
    )


def _sentence(text: str) -> str:
    """Return a text as a sentence; the name of a file stays as it is."""
    first = text.partition(" ")[0]
    return f"{text[:1].upper() if first.isalpha() else text[:1]}{text[1:]}."


def _tone(status: str) -> str:
    if status == "running":
        return "running"
    if status.startswith("completed"):
        return "good"
    return "bad" if status.startswith("failed") else "unknown"


def _beside(found: Comparison) -> Beside:
    tables = [comparison_text.throughput(found), comparison_text.phases(found)]
    if comparison_text.num_recipes(found) == 1:  # else their metrics measure different things
        tables.append(comparison_text.time_to_target(found))
    return Beside(
        runs=comparison_text.overview(found),
        settings=comparison_text.settings(found, shared=True),
        tables=tuple(table for table in tables if table is not None),
        verdicts=_verdicts(found),
        notes=tuple(found.notes),
    )


def _verdicts(found: Comparison) -> tuple[str, ...]:
    """Return whether each run is the same training as the first, if all have one recipe."""
    if comparison_text.num_recipes(found) < 2:
        return tuple(comparison_text.same_training_lines(found))
    told = (
        "Losses and metrics of different recipes measure different things, so each recipe has "
        "charts of its own below. A sample is other work in each, so speeds are not comparable "
        "either."
    )
    if found.target is not None:
        told += f" For the same reason there is no time to {found.target:g}."
    return (told,)


def _memory(system: Sequence[Record]) -> str:
    """Return how much memory was used, or how to have it recorded."""
    names = {
        "process_memory_gib": "The training process of rank 0",
        "memory_used_gib": "The machine",
    }
    said = []
    for name, who in names.items():
        used = [r[name] for r in system if isinstance(r.get(name), int | float)]
        if used:
            said.append(f"{who} used up to {number(max(used))} GiB.")
    return " ".join(said)
