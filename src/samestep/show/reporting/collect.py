"""Everything that a page shows, read from run directories: read, and put in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.run.pictures import read_gallery
from samestep.base.table import texts
from samestep.base.words import number
from samestep.show.reporting import comparison_text, facts, run_sections
from samestep.show.reporting.charts import Chart, Lines, charts_of, phases_chart
from samestep.show.reporting.comparison import (
    Comparison,
    check_target,
    compare_runs,
    num_recipes,
    with_sweeps_opened,
)
from samestep.show.reporting.run_data import RunData, read_run
from samestep.show.reporting.scaling import ScalingStudy, read_study, sweep_charts


class RunPart:
    """What is shown of one run in addition to its curves, as the page's template asks for it."""

    def __init__(self, run: RunData, name: str, place: int) -> None:
        self.name = name
        """A, B … among several runs; empty for a single one."""
        self.title, self.status = str(run.path), run.status
        self.recipe = run.recipe or "recipe unknown"
        tones = {"running": "running", "completed": "good", "failed": "bad"}
        self.tone = tones.get(run.status.partition(" ")[0], "unknown")
        """How the status is marked."""
        self.facts = facts.header(run)
        self.problems = tuple(map(_sentence, run.problems))
        notes = texts(run.plan.get("notes"))
        for event in ("resume", "evaluation", "baselines"):
            notes += [text for record in run.of(event) for text in texts(record.get("problems"))]
        self.notes = [*dict.fromkeys(notes)]
        self.step_time = run_sections.step_time(run)
        self.phases = phases_chart(run, place, f"-{name.lower()}" if name else "")
        self.ranks = run_sections.rank_by_rank(run)
        self.time_line = run_sections.time_line(run)
        self.classes = run_sections.by_class(run)
        self.gallery = read_gallery(run.path)
        self.baselines = facts.baselines_table(run)
        self.memory = _memory(run)
        self.settings = facts.settings_tables(run)
        self.environment = facts.environment_table(run)
        self.commands = facts.commands(run)

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
        return [section for section, present in there.items() if present]


def _sentence(text: str) -> str:
    """Return a text as a sentence; the name of a file stays as it is."""
    first = text.partition(" ")[0]
    return f"{text[:1].upper() if first.isalpha() else text[:1]}{text[1:]}."


def _memory(run: RunData) -> str:
    """Return a sentence on the memory used, if a tracker's process has measured it."""
    names = {
        "process_memory_gib": "The training process of rank 0",
        "memory_used_gib": "The machine",
    }
    used = {
        who: max(
            (r[name] for r in run.system if isinstance(r.get(name), int | float)), default=None
        )
        for name, who in names.items()
    }
    sentences = (f"{who} used up to {number(m)} GiB." for who, m in used.items() if m is not None)
    return " ".join(sentences)


@dataclass(frozen=True, kw_only=True)
class ChartGroup:
    """Charts of the runs of one recipe."""

    title: str
    charts: list[Chart]
    left_out: int
    """How many values have no chart, since a page of more is too long to read."""


class Beside:
    """What only several runs have: tables of what differs."""

    def __init__(self, comparison: Comparison) -> None:
        recipes = num_recipes(comparison.runs)
        self.runs = comparison_text.overview(comparison)
        self.settings = comparison_text.settings(comparison, shared=True)
        self.code = comparison_text.code(comparison)
        self.diffs = [*comparison_text.diffs(comparison)]
        """A run's name and its code's difference from the first's."""
        tables = [comparison_text.throughput(comparison), comparison_text.phases(comparison)]
        if recipes == 1:
            tables.append(comparison_text.time_to_target(comparison))
        self.tables = [table for table in tables if table is not None]
        self.sweep = sweep_charts(comparison)
        """The metric against each setting, if the runs are of one sweep."""
        self.notes = comparison.notes
        same = [] if self.sweep else comparison_text.same_training_lines(comparison)
        self.verdicts = [*same]
        """Whether each run is the same training as the first, if all have one recipe."""
        if recipes > 1:
            apart = (
                "Losses and metrics of different recipes measure different things, so each recipe "
                "has its own charts below. The work per sample differs too, so speeds are not "
                "comparable either."
            )
            if comparison.target is not None:
                apart += f" For the same reason, no time to {comparison.target:g} is shown."
            self.verdicts = [apart]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page's whole content."""

    title: str
    runs: Sequence[RunPart] = ()
    groups: Sequence[ChartGroup] = ()
    beside: Beside | None = None
    studies: Sequence[ScalingStudy] = ()

    @property
    def charts(self) -> list[Chart]:
        """All charts that the page's script draws."""
        phases = [run.phases for run in self.runs if run.phases]
        return [*(chart for group in self.groups for chart in group.charts), *phases]

    @property
    def ended(self) -> bool:
        """Whether all its runs have ended."""
        return not any(run.tone == "running" for run in self.runs)


def collect(paths: Sequence[Path], target: float | None = None) -> Report:
    """Return the report on some runs, or on scaling studies.

    Args:
        paths: run directories, and files of `samestep scale --json`.
        target: with several runs, tell when their metric was first there.
    """
    check_target(target)
    if not paths:
        raise UserError("Name a run: samestep report runs/ID. Several runs are shown side by side.")
    paths = with_sweeps_opened(paths)
    files = [path for path in paths if path.is_file()]
    studies = [read_study(path) for path in files]
    folders = [path for path in paths if path not in files]
    if not folders:
        return Report(title=f"Scaling of {studies[0].recipe}", studies=studies)
    if len(folders) > 1:
        comparison = compare_runs(folders, target=target, any_recipe=True)
        beside, runs, names = Beside(comparison), comparison.runs, comparison.names
        recipes = list(dict.fromkeys(run.recipe or "unknown" for run in runs))
        title = f"{len(runs)} runs of {', '.join(recipes)}"
    else:
        beside, runs, names = None, [read_run(folders[0])], [""]
        title = folders[0].resolve().name
    return Report(
        title=title,
        runs=[RunPart(run, name, n) for n, (run, name) in enumerate(zip(runs, names, strict=True))],
        groups=_groups(runs, names),
        beside=beside,
        studies=studies,
    )


def _groups(runs: Sequence[RunData], names: Sequence[str]) -> list[ChartGroup]:
    """Return the charts, those of each recipe together: only they have the same axes."""
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    groups = []
    for place, recipe in enumerate(recipes):
        places = [n for n, run in enumerate(runs) if run.recipe == recipe]
        suffix = f"-{place + 1}" if place else ""
        lines = [Lines(runs[n]) for n in places]
        charts, more = charts_of(lines, [names[n] for n in places], places, suffix)
        title = (recipe or "unknown recipe") if len(recipes) > 1 else ""
        groups.append(ChartGroup(title=title, charts=charts, left_out=more))
    return groups
