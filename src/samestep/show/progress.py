"""What rank 0 shows: a header, a progress bar, a line an epoch, a table at the end.

On a terminal the bar is redrawn in place a few times a second; elsewhere there are plain lines.
"""

import html
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from samestep.base.errors import escape
from samestep.base.run.records import Record, metric_values, samples_per_step
from samestep.base.startup import drop_output
from samestep.base.words import (
    NOT_FINITE,
    class_table,
    count,
    duration,
    measured,
    short,
    size,
    wrapped,
)

_LEAST_BAR = 12
_SMOOTHING = 0.2
"""How much a new rate counts next to those before it; a single one would let the ETA jump."""
_NOTEBOOK_WIDTH = 100
_REDRAW_EVERY_S = 0.2


@dataclass(frozen=True, kw_only=True)
class BarState:
    """What the bar tells."""

    plan: Record  # the `start` record
    step_samples: float  # of a step, on average
    step: int = 0
    now: int = 1  # the epoch of the latest record that names one
    loss: float | None = None
    metric: str = ""
    """The monitored metric at the latest evaluation, as it is shown."""
    rate: float | None = None  # samples per second, smoothed
    evaluating: bool = False

    def after(self, record: Record) -> "BarState":
        """Return the state after a `step` or `progress` record."""
        new = max(float(record["samples_per_s"]), 1e-9)
        loss = record.get("loss", self.loss)
        if loss is None and "loss" in record:
            loss = math.nan  # null where the record came from a file
        return replace(
            self,
            step=record["step"],
            now=record.get("epoch", self.now),
            loss=loss,
            rate=new if self.rate is None else self.rate + _SMOOTHING * (new - self.rate),
            evaluating=False,
        )

    @property
    def epoch(self) -> str:
        """The epoch that the latest step belongs to, and how many there are."""
        epochs, per_epoch = self.plan["epochs"], self.plan["steps_per_epoch"]
        if per_epoch is None:  # of a stream; only its records know
            return f"{self.now}/{epochs}" if epochs else str(self.now)
        now = max(1, -(-self.step // per_epoch))
        return f"{min(now, epochs):>{len(str(epochs))}}/{epochs}"

    def numbers(self, width: int) -> str:
        """Return the text behind the bar on a terminal of `width` columns."""
        total, monitor = self.plan["total_steps"], str(self.plan.get("monitor", "loss"))
        eta = ""
        if self.rate is not None and total is not None:
            left = max(0, total - self.step) * self.step_samples
            eta = f"ETA {duration(round(left / self.rate))}"
        loss = "" if self.loss is None else f"loss {measured(self.loss)}"
        rate = "" if self.rate is None else f"{short(self.rate):>5} samples/s"
        parts = {"steps": f"{self.step:,} steps"}
        if total is not None:
            steps = f"{self.step:>{len(f'{total:,}')},}/{total:,}"
            parts = {"done": f"{self.step / total:4.0%}", "steps": steps}
        # In the order in which they stand, with their widths; below, the least important first.
        parts |= {
            "loss": f"{loss:<13}",
            "metric": f"{self.metric:<{len(f'val. {monitor}') + 9}}",
            "rate": f"{rate:<15}",
            "eta": f"{'evaluating' if self.evaluating else eta:<11}",
        }
        room = width - len(f"epoch {self.epoch}") - _LEAST_BAR - 2
        for name in ("metric", "rate", "loss", "eta", "steps"):
            if len("  ".join(parts.values())) > room:
                del parts[name]
        return "  ".join(parts.values())


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class TerminalBar:
    """A line that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),  # of one width: the bar does not jump
            console=console,
            auto_refresh=False,  # a thread that redraws would take turns with the training
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None, epoch="", numbers="")

    def draw(self, state: BarState, *, refresh: bool) -> None:
        """Show a state; without `refresh` it may wait for the next one."""
        self._bar.update(
            self._task,
            total=state.plan["total_steps"],
            completed=state.step,
            epoch=state.epoch,
            numbers=state.numbers(self._bar.console.width),
        )
        self._bar.start()
        if refresh:
            self._bar.refresh()

    def stop(self) -> None:
        """Take the bar away."""
        self._bar.stop()


class NotebookBar:
    """A cell's output that is replaced, through IPython: it needs no widgets."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._drawn_at = 0.0

    def draw(self, state: BarState, *, refresh: bool) -> None:
        """Show a state, unless one was shown a moment ago."""
        now = time.monotonic()
        if self._handle is not None and (not refresh or now - self._drawn_at < _REDRAW_EVERY_S):
            return
        self._drawn_at = now
        text = f"epoch {state.epoch}  {state.numbers(_NOTEBOOK_WIDTH)}".rstrip()
        total = state.plan["total_steps"]
        value = "" if total is None else f' value="{state.step}" max="{total}"'
        words = html.escape(text).replace("  ", " &nbsp;")
        bar = f'<progress style="width: 16em"{value}></progress> <code>{words}</code>'
        self._show({"text/plain": text, "text/html": bar})

    def stop(self) -> None:
        """Leave nothing of the bar."""
        if self._handle is not None:
            self._show({"text/plain": "", "text/html": ""})

    def _show(self, shown: dict[str, str]) -> None:
        if self._handle is None:
            display = sys.modules["IPython"].display.display
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Raise what the command line expects, where Rich would exit: `head` has read enough."""
        raise BrokenPipeError("it is closed, or its reader has exited")


def metrics_of(record: Record) -> dict[str, str]:
    """Return the metrics of an `evaluation` record as they are shown; null was NaN or infinite."""
    return {
        name: NOT_FINITE if value is None else measured(value)
        for name, value in metric_values(record).items()
    }


_GO_ON = "samestep train {} --resume"


class Screen:
    """Show the records of one run as they come.

    `go_on` is the command that continues with a run that was stopped, with {} for its path.
    """

    def __init__(self, console: Console | None = None, go_on: str = _GO_ON) -> None:
        self._go_on = go_on
        # A kernel says that it is a terminal; what it prints is wrapped by the notebook, if at all.
        terminal = False if in_notebook() else None
        self._console = console or _Output(
            highlight=False, force_jupyter=False, force_terminal=terminal
        )
        self._plan: Record = {}
        self._state: BarState | None = None
        self._epoch: Record | None = None
        self._lost, self._told = "", False
        self._bar: NotebookBar | TerminalBar | None = None  # it would only fill a file
        if in_notebook():
            self._bar = NotebookBar()
        elif self._console.is_terminal:
            self._bar = TerminalBar(self._console)
        self._shows: dict[str, Callable[[Record], None]] = {  # of other events nothing is shown
            "start": self._show_start,
            "going_on": self._show_going_on,
            "resume": self._show_resume,
            "regroup": self._show_regroup,
            "tracker": self._show_tracker,
            "compile": self._show_compile,
            "progress": self._show_progress,
            "epoch": self._show_epoch,
            "evaluation": self._show_evaluation,
            "picture": self._show_picture,
            "baselines": self._show_baselines,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._trying():
            self._flush_epoch()
            if self._bar is not None:
                self._bar.stop()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Show something, unless the output takes nothing: a training continues without it."""
        try:
            yield
        except OSError as error:
            self._lost = f"Standard output cannot be written: {error.strerror or error}."
            drop_output()

    def show(self, record: Record) -> str:
        """Show one record; return, once, why nothing can be shown any more."""
        self.show_message(record)
        was_told, self._told = self._told, bool(self._lost)
        return "" if was_told else self._lost

    def show_message(self, record: Record) -> None:
        """Show a message that is not one of the run's records."""
        with self._trying():
            self._show(record)

    def _show(self, record: Record) -> None:
        event, epoch = record["event"], self._epoch
        is_late = event == "checkpoint" and epoch is not None and record["step"] < epoch["step"]
        if event not in ("evaluation", "progress", "tracker") and not is_late:
            self._flush_epoch()
        if show := self._shows.get(event):
            show(record)

    def _print(self, text: str = "") -> None:
        self._console.print(text, soft_wrap=True)
        if not self._console.is_terminal:
            sys.stdout.flush()  # so that the log of a running job has each line

    def _row(self, name: str, text: str, indent: int, style: str = "bold") -> None:
        """Print a name and what belongs to it; on a terminal no word of it is broken."""
        name = f"{name:<{indent - 1}} "
        if self._console.is_terminal:
            room = max(20, self._console.width - indent)
            text = f"\n{' ' * indent}".join(wrapped(text, "", room))
        self._print(f"[{style}]{escape(name)}[/]{escape(text)}")

    def _show_start(self, plan: Record) -> None:
        self._plan = plan
        ranks = count(plan["world_size"], "rank")
        nodes = f" on {count(plan['num_nodes'], 'node')}" if plan["num_nodes"] > 1 else ""
        backend = f", {plan['backend']}" if plan["world_size"] > 1 else ""
        threads = f", {count(plan['threads'], 'thread')} each" if plan["device"] == "cpu" else ""
        virtual = plan.get("virtual_ranks")
        shares = count(virtual, "virtual rank") if virtual else ranks
        even = plan["micro_batch_size"] * (virtual or plan["world_size"]) * plan["accumulate"]
        most = "" if even == plan["global_batch_size"] else "at most "
        steps = count(plan["accumulate"], "micro-step")
        parts = f"{most}{plan['micro_batch_size']} × {shares} × {steps}"
        if plan.get("batch_size_per_rank"):
            parts += " (--batch-size-per-rank: other ranks, another batch)"
        own = plan.get("own_lr")
        lr = f"{plan['lr']:.4g}" if own is None else f"{own:.4g}, of the recipe's own optimizer"
        if plan["lr_scaling"] != "none":
            ratio = plan["lr"] / plan["base_lr"]
            lr += f" = {plan['base_lr']:.4g} × {ratio:.4g} ({plan['lr_scaling']} scaling)"
        order = f", order: {o}" if (o := plan.get("order", "shuffled")) != "shuffled" else ""
        num_samples = plan["num_samples"]
        samples = "a stream" if num_samples is None else f"{num_samples:,} training samples"
        batch = f"{plan['global_batch_size']} samples per step = {parts}"
        if tokens := plan.get("batch_tokens"):
            most = plan["global_batch_size"]
            batch = f"{tokens} tokens per step, at most {most} samples, on {shares} × {steps}"
        rows = {
            plan["recipe"]: f"{plan['parameters']:,} parameters, {samples}",
            "where": f"{ranks}{nodes}, {plan['device']}{backend}{threads}, {plan['precision']}",
            "batch": batch,
            "length": self._length(plan["total_steps"], plan["epochs"]) + order,
            "lr": lr,
            "run": plan["run_dir"],
        }
        for note in plan["notes"]:
            self._row("note", note, 8, "yellow")
        for name, value in rows.items():
            self._row(name, value, 8)
        self._begin_bar(plan)

    def _show_going_on(self, record: Record) -> None:  # it was begun by another rank
        self._begin_bar(record["plan"])

    def _show_resume(self, record: Record) -> None:
        for problem in record["problems"]:
            self._print(f"[yellow]passed over[/] {escape(problem)}")
        self._print(f"[bold]resume  [/]from {record['checkpoint']}, step {record['step']:,}")
        for change in record.get("changes", []):
            self._print(f"[yellow]changed[/] {escape(change)}")

    def _begin_bar(self, plan: Record) -> None:
        self._plan = plan
        self._draw(BarState(plan=plan, step_samples=samples_per_step(plan)), refresh=True)

    def _show_regroup(self, record: Record) -> None:
        changes, ranks = [*record["gone"]], record["world_size"]
        if num_joined := ranks - record["ranks_before"] + len(changes):
            changes.append(f"{count(num_joined, 'rank')} joined")
        going = f"{count(ranks, 'rank')} from step {record['step'] + 1:,} on"
        text = f"{', '.join(changes) or 'ranks reconnected'}: {going}, {record['seconds']:.2f} s"
        self._print(f"[yellow]regroup[/] {escape(text)}")

    def _show_tracker(self, record: Record) -> None:
        marks = {"note": "[yellow]note[/]    ", "warning": "[yellow]warning[/] "}
        name = f"[bold]{escape(record['tracker']):<7}[/] "
        self._print(marks.get(record["kind"], name) + escape(record["text"]))

    def _show_compile(self, record: Record) -> None:
        self._print(f"[bold]compile [/]{record['what']} ({duration(record['seconds'])})")

    def _show_progress(self, record: Record) -> None:
        if self._state is not None:
            self._draw(self._state.after(record), refresh=record["event"] == "progress")

    _show_step = _show_progress

    def _draw(self, state: BarState, *, refresh: bool) -> None:
        self._state = state
        if self._bar is not None:
            self._bar.draw(state, refresh=refresh)

    def _show_epoch(self, record: Record) -> None:
        self._epoch = record
        if self._state is not None:
            self._draw(replace(self._state, step=record["step"], evaluating=True), refresh=True)

    def _show_evaluation(self, record: Record) -> None:
        values = metrics_of(record)
        monitored = self._plan.get("monitor", "loss")
        if self._state is not None and record["split"] == "validation":
            metric = f"val. {monitored} {values.get(monitored, '')}"
            self._draw(replace(self._state, metric=metric, evaluating=False), refresh=False)
        text = "  ".join(f"{name} {value}" for name, value in values.items())
        for problem in record.get("problems", []):
            self._print(f"[yellow]passed over[/] {escape(problem)}")
        if record["split"] == "validation":
            self._flush_epoch(f"  validation: {text}", at_step=record["step"])
            if values.get(monitored) == NOT_FINITE:
                self._print(
                    f"[yellow]warning[/] {escape(monitored)} is NaN or infinite after step "
                    f"{record['step']:,}: not an improvement; a checkpoint here ranks last."
                )

    def _show_picture(self, record: Record) -> None:
        if problem := record.get("problem"):
            self._row("note", f"Picture {record['name']}: {problem}", 8, "yellow")

    def _show_baselines(self, record: Record) -> None:
        for problem in record["problems"]:
            self._row("warning", f"The baselines were not measured. {problem}", 8, "yellow")
        for name, result in record["values"].items():
            if isinstance(result, str):  # why it was left out
                self._row("note", f"Baseline {name}: {result}", 8, "yellow")

    def _flush_epoch(self, more: str = "", at_step: int = 0) -> None:
        record, self._epoch = self._epoch, None
        if record is not None:
            width = len(str(self._plan["epochs"] or 1))
            trained = metrics_of({"loss": record["loss"], **record.get("metrics", {})})
            values = "  ".join(f"{name} {value}" for name, value in trained.items())
            self._numbers(
                f"epoch {record['epoch']:>{width}}  {values}{more}"
                f"  {short(record['samples_per_s'])} samples/s{_quoted(record)}"
            )
        elif more:
            self._numbers(f"step {at_step:,}{more}")

    def _numbers(self, text: str) -> None:
        """Print names and values; on a narrow terminal a value stays next to its name."""
        if self._console.is_terminal and len(text) > self._console.width:
            pairs = "  ".join(part.replace(" ", "\xa0") for part in text.split("  "))
            text = "\n".join(wrapped(pairs, "    ", self._console.width)).replace("\xa0", " ")
        self._print(escape(text))

    def _length(self, steps: int | None, epochs: int | None) -> str:
        """Return a number of steps, and of epochs, of which the last may be a part."""
        per_epoch = self._plan["steps_per_epoch"]
        if per_epoch is None:  # of a stream
            limits = [count(epochs, "epoch")] if epochs else []
            limits += [count(steps, "step")] if steps else []
            return ", ".join(limits)
        assert steps is not None
        assert epochs is not None
        shown = f"{steps / per_epoch:.2f} epochs" if steps % per_epoch else count(epochs, "epoch")
        return f"{shown}, {count(steps, 'step')}"

    def result(self, path: Path, result: dict[str, Any]) -> None:
        """Show the run's result."""
        with self._trying():
            self._print_result(path, result)

    def _print_result(self, path: Path, result: dict[str, Any]) -> None:
        best, test = result["best"], result["test"]
        shown_path = str(self._plan.get("run_dir", path))  # as it was named
        length = self._length(result["steps"], result["epochs"])
        speed = f"{duration(result['training_seconds'])}, {short(result['samples_per_s'])}"
        rows = [
            ("status", f"{result['status']} ({result['reason']})"),
            ("trained", f"{length}, {speed} samples/s"),
        ]
        if best["value"] is not None:
            value = f"{best['metric']} {measured(best['value'])}"
            rows.append(("best", f"{value} on validation, epoch {best['epoch']}"))
        if test:
            shown = "  ".join(f"{name} {value}" for name, value in metrics_of(test).items())
            about = f"({count(test['samples'], 'sample')}, {test['checkpoint']})"
            rows.append(("test", f"{shown}  {about}"))
        rows += _baseline_rows(result.get("baselines", {}))
        rows.append(("run", shown_path))
        if test and "confusion" in test:
            lines = class_table(test["per_class"], test["confusion"])
            rows += zip(["classes", *[""] * len(lines)], lines, strict=False)
        self._print()
        for name, value in rows:
            self._row(name, value, 9)
        if result["status"] == "stopped":
            self._print(f"\nContinue from here with: {escape(self._go_on.format(shown_path))}")


def _quoted(record: Record) -> str:
    """Return MFU and peak memory of an epoch on a GPU whose peak rate is known; else ""."""
    if record.get("mfu") is None:
        return ""
    held = record.get("peak_memory_bytes")
    return f"  {record['mfu']:.1%} MFU" + (f"  {size(held)}" if held else "")


def _baseline_rows(baselines: dict[str, dict[str, float | None]]) -> list[tuple[str, str]]:
    """Return a row for each baseline; the same metrics stand below each other."""
    shown = {name: metrics_of(values) for name, values in baselines.items()}
    widths: dict[str, int] = {"": max(map(len, shown), default=0)}
    for values in shown.values():
        for metric, value in values.items():
            widths[metric] = max(widths.get(metric, 0), len(value))
    lines = [
        "  ".join([f"{name:<{widths['']}}", *(f"{m} {v:>{widths[m]}}" for m, v in values.items())])
        for name, values in shown.items()
    ]
    return list(zip(["baseline", *[""] * len(lines)], lines, strict=False))


class Nothing:
    """Take records, and show none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, record: Record) -> str:
        """Show a record as `show_message` does; there is nothing to lose."""
        self.show_message(record)
        return ""

    def show_message(self, record: Record) -> None:
        """Show nothing of a record."""

    def result(self, path: Path, result: dict[str, Any]) -> None:
        """Show nothing of how the run ended."""
