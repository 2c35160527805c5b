"""Profile any training script: run it as Python would, look at some of its steps, then end it."""

import contextlib
import dataclasses
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from samestep.errors import UserError
from samestep.machine import usable_cores
from samestep.profiling.bottleneck import judge
from samestep.profiling.hooks import Hooks
from samestep.profiling.measured import Measured, Operations, Rank
from samestep.profiling.meeting import Left, Meeting
from samestep.profiling.profile import Profile
from samestep.profiling.stages import Finished, Span, Stages
from samestep.ranks.startup import resume_collections
from samestep.training.phases import Phases


class ScriptFailed(Exception):  # noqa: N818 - what failed is the script
    """The script ended by an error of its own, or by an exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        """Its traceback, as Python would print it; empty for an exit code."""
        self.steps = 0
        """Optimizer steps that it took."""
        self.found: Profile | None = None
        """What was measured until then, if that was enough."""

    def told(self, script: Path) -> str:
        """Return the one line to show below the script's own error."""
        how = "an error" if isinstance(self.__cause__, Exception) else f"exit code {self.code}"
        steps = f"{self.steps:,} step{'' if self.steps == 1 else 's'}"
        what = (
            "nothing was measured."
            if self.found is None
            else ("the profile is of what was measured until then.")
        )
        return f"{script.name} ended with {how} after {steps}: {what}"


def profile_script(
    script: Path,
    arguments: list[str],
    meeting: Meeting,
    *,
    local_ranks: int,
    epoch: int | None = None,
    seconds: float = 3.0,
    quiet: bool = False,
    module: bool = False,
) -> Profile | None:
    """Run a script until some of its steps are measured and traced; return what rank 0 has to show.

    Args:
        script: a Python file, or the name of a module.
        arguments: what it is to see as its own.
        meeting: this rank among the others, and the directory for the traces.
        local_ranks: ranks on this node.
        epoch: trace this epoch, counted from 1; by default a few steps.
        seconds: how long to measure, at least.
        quiet: whether what it prints goes to standard error.
        module: whether `script` names a module, to be run as `python -m` does.

    Raises:
        ScriptFailed: the script failed by itself.
        UserError: it took too few steps, or other ranks took more; a file could not be written.
    """
    meeting.join()
    phases = Phases()
    hooks = Hooks(phases, several=meeting.world_size > 1)
    stages = Stages(
        phases=phases,
        agree=meeting.agree,
        seconds=seconds,
        epoch=epoch,
        whole_epochs=lambda: hooks.loader is not None,
    )
    hooks.on_step, hooks.on_epoch = stages.at, stages.epoch_begins
    hooks.on_profiler = stages.script_profiles
    hooks.on_device = lambda phases: setattr(stages, "phases", phases)
    failure = None
    try:
        with hooks.installed(), _to_stderr() if quiet else contextlib.nullcontext():
            _run(script, arguments, module=module)
    except Left as left:
        raise _unequal(script, left.steps, meeting.rank, hooks.steps) from left
    except ScriptFailed as error:
        failure = error
    if stages.stage != "done":  # else it was ended, as the other ranks were
        stages.end()
        if failure is None:
            meeting.end(hooks.steps)
    if failure is not None:
        failure.steps = hooks.steps
        if stages.span is not None and meeting.world_size == 1:
            found = [_found(stages, stages.span, hooks, meeting)]
            failure.found = _profile(script, found, stages.span, hooks, meeting, local_ranks)
        raise failure
    if epoch is not None and stages.tracer is None and hooks.steps:
        raise _no_such_epoch(script, hooks.epochs, epoch)
    if stages.span is None:
        raise _too_few(script, hooks.steps)
    meeting.tell(_found(stages, stages.span, hooks, meeting))
    if meeting.rank != 0:
        return None
    found = meeting.told()
    meeting.close()
    return _profile(script, found, stages.span, hooks, meeting, local_ranks)


def _run(script: Path, arguments: list[str], *, module: bool) -> None:
    """Run a script as `python script.py …` or `python -m module …` does, until all is seen."""
    before, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(Path.cwd() if module else script.parent.resolve()))
    resume_collections()  # its collections are part of what is measured
    try:
        if module:
            runpy.run_module(str(script), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")
    except Finished:
        return
    except SystemExit as stop:
        if stop.code not in (None, 0):
            code = stop.code if isinstance(stop.code, int) else 1
            text = "" if isinstance(stop.code, int) else f"{stop.code}\n"
            raise ScriptFailed(code, text) from stop
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise ScriptFailed(1, _as_python_prints(error, script)) from error
    finally:
        sys.argv, sys.path[:] = before, path


def _as_python_prints(error: Exception, script: Path) -> str:
    """Return a traceback without the frames that called the script, or the module."""
    trace = error.__traceback__
    own = str(script)
    while trace is not None and trace.tb_frame.f_code.co_filename != own:
        spec = trace.tb_frame.f_globals.get("__spec__")
        if spec is not None and spec.name in (own, f"{own}.__main__"):
            break
        trace = trace.tb_next
    shown = error.with_traceback(trace or error.__traceback__)
    if isinstance(error, SyntaxError):
        shown = error.with_traceback(None)
    return "".join(traceback.format_exception(shown))


@contextmanager
def _to_stderr() -> Iterator[None]:
    """Let what is printed inside, also by code in C, go to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _too_few(script: Path, steps: int) -> UserError:
    if steps == 0:
        return UserError(
            f"{script} ended without a single step of a torch.optim optimizer, so there is nothing "
            "to profile. Does it train with these arguments (they follow `--`), and in this very "
            "process? Let samestep start its ranks with --nproc. A recipe file ends with "
            "`recipe = Recipe(…)`.",
            on_all_ranks=True,
        )
    return UserError(
        f"{script} took {steps} optimizer step{'s' if steps > 1 else ''} and ended: too few to tell"
        " anything. Let it take at least 4, better 100.",
        on_all_ranks=True,
    )


def _no_such_epoch(script: Path, epochs: int, wished: int) -> UserError:
    if not epochs:
        return UserError(
            f"--epoch is {wished}, and {script} trains without a torch DataLoader, so that its "
            "epochs cannot be told. Leave --epoch out: some steps are traced then.",
            on_all_ranks=True,
        )
    if wished <= epochs:
        return UserError(
            f"{script} has a profiler of its own on in epoch {wished}, and there can be only one: "
            "give --epoch another one, or leave it out.",
            on_all_ranks=True,
        )
    return UserError(
        f"{script} has {epochs} epoch{'s' if epochs > 1 else ''}, and --epoch is {wished}. Give "
        "one of them, or leave --epoch out.",
        on_all_ranks=True,
    )


def _unequal(script: Path, theirs: int, rank: int, own: int) -> UserError:
    return UserError(
        f"Rank 0 of {script} ended after {theirs:,} optimizer steps, and rank {rank} still runs "
        f"after {own:,}: ranks that are profiled together have to take equally many. Profile it "
        "with --nproc 1, or give all ranks as much data."
    )


def _found(stages: Stages, span: Span, hooks: Hooks, meeting: Meeting) -> dict[str, Any]:
    """Write this rank's trace; return what all are to know of this rank."""
    kept, trace = None, None
    workers = hooks.loader.num_workers if hooks.loader is not None else 0
    if stages.tracer is not None and stages.traced:
        name = f"rank{meeting.rank}_workers_{workers}"
        kept = stages.tracer.keep(meeting.folder / "traces", name)
        trace = f"traces/trace_{name}.json.gz"
    phases = {phase: seconds / span.steps for phase, seconds in span.phases.items()}
    starts = phases.pop("workers", 0.0)
    return {
        "phases": {**phases, "data": phases.get("data", 0.0) + starts},
        "worker_start": starts,
        "batches": hooks.batches / max(1, hooks.steps),
        "operations": dataclasses.asdict(kept.operations) if kept is not None else None,
        "starved": span.cores.waited / span.steps,
        "wanted_cores": span.cores.wanted,
        "memory": kept.memory if kept is not None else None,
        "trace": trace,
        "profiled_itself": stages.profiled_itself,
    }


def _rank(found: dict[str, Any]) -> Rank:
    """Return a rank as it came out of JSON, which knows no tuples."""
    operations, memory = found["operations"], found["memory"]
    if operations is not None:
        top = {
            key: tuple((name, share) for name, share in operations[key])
            for key in ("top_matmul", "top_memory")
        }
        operations = Operations(**{**operations, **top})
    return Rank(
        phases=found["phases"],
        operations=operations,
        starved=found["starved"],
        wanted_cores=found["wanted_cores"],
        memory=(memory[0], memory[1]) if memory else None,
    )


def _profile(
    script: Path,
    found: list[dict[str, Any]],
    span: Span,
    hooks: Hooks,
    meeting: Meeting,
    local_ranks: int,
) -> Profile:
    loader, optimizer = hooks.loader, hooks.optimizer
    assert optimizer is not None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    batch = getattr(loader, "batch_size", None) or 0
    measured = Measured(
        ranks=tuple(_rank(each) for each in found),
        steps=span.steps,
        wall=span.seconds / span.steps,
        samples=batch * round(found[0]["batches"]) * len(found),
        worker_start=max(each["worker_start"] for each in found),
        device=parameters[0].device.type,
        cores=len(usable_cores()),
        local_ranks=local_ranks,
        threads=torch.get_num_threads(),
        workers=loader.num_workers if loader is not None else 0,
        iterable=loader is not None and isinstance(loader.dataset, IterableDataset),
        in_memory=loader is None,
        gradient_bytes=sum(p.nbytes for p in parameters),
        script=True,
        profiled_itself=any(each["profiled_itself"] for each in found),
    )
    traces = [each["trace"] for each in found if each["trace"] is not None]
    return Profile(
        name=script.name,
        path=meeting.folder,
        measured=measured,
        verdict=judge(measured),
        traces=tuple(traces),
    )
