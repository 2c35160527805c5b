"""Profile any training script: run it as Python would, measure some of its steps, then end it."""

import contextlib
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType

import msgspec
import torch
from torch.utils.data import IterableDataset

from samestep.errors import UserError
from samestep.machine import usable_cores
from samestep.profiling.bottleneck import judge
from samestep.profiling.hooks import Hooks
from samestep.profiling.measured import Extent, MeasuredRank, MeasuredSteps
from samestep.profiling.profile_report import Profile
from samestep.profiling.stages import Stages, TimeAccount
from samestep.ranks.launch import Launch
from samestep.ranks.startup import resume_collections
from samestep.ranks.world import Store, StoreTimeout, open_store
from samestep.reporting.words import count
from samestep.training.phases import Phases

_TIMEOUT_S = 120.0
_ENDED = "ended after "


class ScriptFailed(Exception):  # noqa: N818 - what failed is the script
    """The script ended by an error of its own, or by an exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text  # its traceback, as Python would print it; empty for an exit code
        self.steps = 0  # optimizer steps that it took
        self.found: Profile | None = None  # what was measured until then, if that was enough

    def summary(self, script: Path) -> str:
        """Return the line to show below the script's own error."""
        how = f"ended with exit code {self.code}"
        if isinstance(self.__cause__, _Done | Exception):
            was_ended = isinstance(self.__cause__, _Done)
            how = "was ended by SIGTERM" if was_ended else "ended with an error"
        until = "the profile is of what was measured until then"
        found = until if self.found is not None else "nothing was measured"
        return f"{script.name} {how} after {count(self.steps, 'step')}: {found}."


class _Done(BaseException):
    """Raised in the script to end it: the profile is complete."""


class RankZeroEnded(BaseException):
    """Rank 0 has ended; a BaseException, which the script's own `except Exception` lets pass."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


class ScriptRanks:
    """One rank of a script; they agree through a store that is not the script's own."""

    def __init__(self, launch: Launch, within_s: float = _TIMEOUT_S) -> None:
        self.rank, self.world_size = launch.rank, launch.world_size
        self.local_world_size = launch.local_world_size
        self._launch, self._within_s = launch, within_s
        self._answers = 0
        self._store: Store | None = None

    def join(self) -> None:
        """Wait until all ranks are here."""
        if self.world_size == 1:
            return
        try:
            self._store = open_store(self._launch, self._within_s)
        except RuntimeError as error:
            raise self._waited("for rank 0 to listen") from error
        self._put(f"here-{self.rank}", "")
        for rank in range(self.world_size):
            self._get(f"here-{rank}", f"for rank {rank} to start")

    def agree(self, function: Callable[[], int]) -> int:
        """Return a function's value on rank 0; RankZeroEnded once that has ended."""
        if self.world_size == 1:
            return function()
        self._answers += 1
        key = f"answer-{self._answers}"
        if self.rank == 0:
            answer = function()
            self._put(key, str(int(answer)))
            return answer
        said = self._get(key, "for rank 0 to take as many optimizer steps as this rank")
        if said.startswith(_ENDED):
            raise RankZeroEnded(int(said.removeprefix(_ENDED)))
        return int(said)

    def end(self, steps: int) -> None:
        """Tell the other ranks, as the next answer, that rank 0 has ended after this many steps."""
        if self.world_size > 1 and self.rank == 0:
            self._put(f"answer-{self._answers + 1}", f"{_ENDED}{steps}")

    def gather(self, found: str) -> list[str]:
        """Return what each rank found, in rank order, on rank 0; on other ranks an empty list."""
        if self.rank != 0:
            self._put(f"found-{self.rank}", found)
            return []
        others = range(1, self.world_size)
        return [found, *(self._get(f"found-{r}", f"for the profile of rank {r}") for r in others)]

    def _put(self, key: str, value: str) -> None:
        assert self._store is not None
        self._store.set(f"profile/{key}", value)

    def _get(self, key: str, what: str) -> str:
        assert self._store is not None
        try:
            self._store.wait([f"profile/{key}"], timedelta(seconds=self._within_s))
        except StoreTimeout as error:
            raise self._waited(what) from error
        return self._store.get(f"profile/{key}").decode()

    def _waited(self, what: str) -> UserError:
        return UserError(
            f"Rank {self.rank} waited {self._within_s:.0f} s {what}, at "
            f"{self._launch.master_addr}:{self._launch.master_port}. Start all "
            f"{self.world_size} ranks at once, and let all take equally many optimizer steps."
        )


_Found = tuple[MeasuredRank, float, str | None, bool]
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
            _to_stderr() if quiet else contextlib.nullcontext(),
            _catching_sigterm(received, alone=ranks.world_size == 1),
        ):
            _run(script, arguments, module=module)
        if received and ranks.world_size == 1:
            raise ScriptFailed(128 + received[0], "") from _Done()
    except RankZeroEnded as ended:
        raise UserError(
            f"Rank 0 of {script} ended after {ended.steps:,} optimizer steps, and rank "
            f"{ranks.rank} still runs after {hooks.steps:,}: ranks that are profiled together have "
            "to take equally many. Profile it with --nproc 1, or give all ranks as much data."
        ) from ended
    except ScriptFailed as error:
        failure = error
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
        failure.steps, failure.found = hooks.steps, profile
        raise failure
    return profile


def _stop_if(done: bool) -> None:
    if done:
        raise _Done


@contextmanager
def _catching_sigterm(received: list[int], *, alone: bool) -> Iterator[None]:
    """Note the first SIGTERM: a single rank's script ends at once, several ranks agree on it."""

    def end(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        received.append(signum)
        if alone:
            raise _Done

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(script: Path, arguments: list[str], *, module: bool) -> None:
    """Run a script as `python script.py …` or `python -m module …` does, until `_Done`."""
    before, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(Path.cwd() if module else script.parent.resolve()))
    resume_collections()  # garbage collection is measured too
    try:
        if module:
            runpy.run_module(str(script), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")
    except _Done:
        return
    except SystemExit as stop:
        if stop.code not in (None, 0):
            code = stop.code if isinstance(stop.code, int) else 1
            text = "" if isinstance(stop.code, int) else f"{stop.code}\n"
            raise ScriptFailed(code, text) from stop
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
    trace = None if isinstance(error, SyntaxError) else trace or error.__traceback__
    return "".join(traceback.format_exception(error.with_traceback(trace)))


@contextmanager
def _to_stderr() -> Iterator[None]:
    """Send what is printed inside, also by C code, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _why_nothing(script: Path, hooks: Hooks, epoch: int | None) -> str:
    if not hooks.steps:
        return (
            f"{script} ended without a single step of a torch.optim optimizer, and its backward "
            "passes changed no weights, so there is nothing to profile. Does it train with these "
            "arguments (they follow `--`), and in this very process? Let samestep start its ranks "
            "with --nproc. A recipe file ends with `recipe = Recipe(…)`."
        )
    if epoch is None:
        return (
            f"{script} took {count(hooks.steps, 'optimizer step')} and ended: too few to tell "
            "anything. Let it take at least 4, better 100."
        )
    if not hooks.epochs:
        return (
            f"--epoch is {epoch}, and {script} trains without a torch DataLoader, so that its "
            "epochs cannot be told. Leave --epoch out: some steps are traced then."
        )
    if epoch <= hooks.epochs:
        return (
            f"{script} has a profiler of its own on in epoch {epoch}, and there can be only one: "
            "give --epoch another one, or leave it out."
        )
    return (
        f"{script} has {count(hooks.epochs, 'epoch')}, and --epoch is {epoch}. Give one of them, "
        "or leave --epoch out."
    )


def _gather_profile(
    script: Path, stages: Stages, hooks: Hooks, ranks: ScriptRanks, out: Path, *, stopped: bool
) -> Profile | None:
    """Write this rank's trace; return the profile on rank 0, once all ranks have written theirs."""
    assert stages.span is not None
    loader, span, mine, trace = hooks.loader, stages.span, stages.span.rank, None
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
    found = [msgspec.json.decode(one, type=_Found) for one in ranks.gather(sent)]
    if ranks.rank != 0:
        return None
    measured_ranks, worker_starts, traces, profiled_themselves = zip(*found, strict=True)
    batch = getattr(loader, "batch_size", None) or 0
    measured = MeasuredSteps(
        ranks=measured_ranks,
        steps=span.steps,
        wall=span.seconds / span.steps,
        samples=batch * round(hooks.batches / max(1, hooks.steps)) * len(found),
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
        name=script.name, path=out, measured=measured, verdict=judge(measured), traces=traces
    )
