"""Profile any training script: run it as Python would, measure some of its steps, then end it."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import msgspec
import torch
from torch.utils.data import IterableDataset

from samestep.base.errors import UserError
from samestep.base.machine import usable_cores
from samestep.base.phases import Phases
from samestep.base.words import count
from samestep.launch.ranks import watched
from samestep.scripts.hooks import Hooks
from samestep.scripts.measuring.bottleneck import diagnose
from samestep.scripts.measuring.measured import Extent, MeasuredRank, MeasuredSteps
from samestep.scripts.measuring.profile_report import Profile
from samestep.scripts.measuring.stages import Stages, TimeAccount
from samestep.scripts.running import (
    Done,
    RankZeroEnded,
    ScriptFailed,
    ScriptRanks,
    run_script,
    to_stderr,
)

_Sent = tuple[MeasuredRank, float, str | None, bool]
"""What a rank sends to rank 0: with the seconds that its workers took to start, its trace, and
whether the script profiled itself."""


def profile_script(
    script: Path,
    arguments: list[str],
    ranks: ScriptRanks,
    out: Path,
    extent: Extent,
    *,
    quiet: bool = False,
    module: bool = False,
) -> Profile | None:
    """Run a script until some of its steps are measured and traced; return the profile on rank 0.

    `script` is a Python file, or with `module` the name of a module to run as `python -m` does.
    The traces go to `out`; with `quiet` the script's output goes to standard error. SIGTERM ends
    the script; what was measured until then counts.

    Raises ScriptFailed if the script fails, or if SIGTERM ends a single rank.
    """
    ranks.join()
    hooks = Hooks(Phases(), several=ranks.world_size > 1)
    received: list[int] = []
    epoch = extent.epoch
    stages = Stages(
        TimeAccount(lambda: hooks.phases),
        ranks.agree,
        extent,
        wants_epochs=lambda: hooks.loader is not None,
        stop=lambda: bool(received),
    )

    hooks.on_step = lambda step: _stop_if(stages.at(step))
    hooks.on_epoch = lambda number: _stop_if(stages.epoch_begins(number))
    hooks.on_profiler = stages.script_profiles
    if ranks.rank == 0:
        hooks.on_own_updates = lambda: sys.stderr.write(
            f"samestep: {script} changes its weights without a torch.optim optimizer: each change "
            "between two backward passes counts as a step, and its time as 'other'.\n"
        )
    failure = profile = None
    try:
        with (
            hooks.installed(),
            to_stderr() if quiet else contextlib.nullcontext(),
            _catching_sigterm(received, alone=ranks.world_size == 1),
        ):
            run_script(script, arguments, module=module)
        if received and ranks.world_size == 1:
            raise ScriptFailed(128 + received[0], "") from Done()
    except RankZeroEnded as ended:
        raise UserError(
            f"Rank 0 of {script} ended after {ended.steps:,} optimizer steps, and rank "
            f"{ranks.rank} still runs after {hooks.steps:,}: ranks profiled together must take "
            "the same number. Profile it with --nproc 1, or give all ranks the same amount of data."
        ) from ended
    except ScriptFailed as error:
        failure = error
    watched.turn_to(watched.END)
    if not stages.done:  # else it was ended, as the other ranks were
        stages.end()
        if failure is None:
            ranks.end(hooks.steps)
    if failure is None and (stages.span is None or (epoch is not None and stages.tracer is None)):
        why = _why_nothing(script, hooks, None if stages.tracer else epoch)
        raise UserError(why, on_all_ranks=True)
    if stages.span is not None and (failure is None or ranks.world_size == 1):
        profile = _gather_profile(script, stages, hooks, ranks, out, stopped=bool(received))
    if failure is not None:
        failure.steps, failure.profile = hooks.steps, profile
        raise failure
    return profile


def _stop_if(done: bool) -> None:
    if done:
        raise Done


@contextmanager
def _catching_sigterm(received: list[int], *, alone: bool) -> Iterator[None]:
    """Note the first SIGTERM: a single rank's script ends at once, several ranks agree on it."""

    def end(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        received.append(signum)
        if alone:
            raise Done

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _why_nothing(script: Path, hooks: Hooks, epoch: int | None) -> str:
    if not hooks.steps:
        return (
            f"{script} ended without a single step of a torch.optim optimizer, and its backward "
            "passes changed no weights, so there is nothing to profile. Does it train with these "
            "arguments (they follow `--`), and in this process? Let samestep start its ranks with "
            "--nproc. A recipe file ends with `recipe = Recipe(…)`."
        )
    if epoch is None:
        return (
            f"{script} took {count(hooks.steps, 'optimizer step')} and ended: too few to measure. "
            "Let it take at least 4, better 100."
        )
    if not hooks.epochs:
        return (
            f"--epoch is {epoch}, and {script} trains without a torch DataLoader, so its epochs "
            "are unknown. Leave --epoch out to trace some steps."
        )
    if epoch <= hooks.epochs:
        return (
            f"{script} runs its own profiler in epoch {epoch}, and only one can run: choose "
            "another --epoch, or leave it out."
        )
    return (
        f"{script} has {count(hooks.epochs, 'epoch')}, and --epoch is {epoch}. Choose one of them, "
        "or leave --epoch out."
    )


def _gather_profile(
    script: Path, stages: Stages, hooks: Hooks, ranks: ScriptRanks, out: Path, *, stopped: bool
) -> Profile | None:
    """Write this rank's trace; return the profile on rank 0, once all ranks have written theirs."""
    assert stages.span is not None
    loader = hooks.loader
    span = stages.span
    mine = stages.span.rank
    trace = None
    workers = loader.num_workers if loader is not None else 0
    if stages.tracer is not None and stages.tracer.steps:
        name = f"rank{ranks.rank}_workers_{workers}"
        operations, memory = stages.tracer.keep(out / "traces", name)
        mine = replace(mine, operations=operations, memory=memory)
        trace = f"traces/trace_{name}.json.gz"
    worker_start = mine.phases.get("workers", 0.0)
    phases = {name: seconds for name, seconds in mine.phases.items() if name != "workers"}
    mine = replace(mine, phases=phases | {"data": phases.get("data", 0.0) + worker_start})
    sent = msgspec.json.encode((mine, worker_start, trace, stages.profiled_itself)).decode()
    gathered = [msgspec.json.decode(text, type=_Sent) for text in ranks.gather(sent)]
    if ranks.rank != 0:
        return None
    measured_ranks, worker_starts, traces, profiled_themselves = zip(*gathered, strict=True)
    batch = getattr(loader, "batch_size", None) or 0
    measured = MeasuredSteps(
        ranks=measured_ranks,
        steps=span.steps,
        wall=span.seconds / span.steps,
        samples=batch * round(hooks.batches / max(1, hooks.steps)) * len(gathered),
        worker_start=max(worker_starts),
        device=hooks.trained[0].device.type,
        cores=len(usable_cores()),
        local_ranks=ranks.local_world_size,
        threads=torch.get_num_threads(),
        workers=workers,
        iterable=loader is not None and isinstance(loader.dataset, IterableDataset),
        in_memory=loader is None,
        gradient_bytes=sum(p.nbytes for p in hooks.trained),
        script=True,
        profiled_itself=any(profiled_themselves),
        stopped=stopped,
    )
    traces = tuple(filter(None, traces))
    return Profile(
        name=script.name, path=out, measured=measured, verdict=diagnose(measured), traces=traces
    )
