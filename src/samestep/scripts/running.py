"""Run any script as Python would, on one rank or on several that agree through a store."""

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.startup import resume_collections
from samestep.base.words import count
from samestep.launch.ranks.launch import Launch
from samestep.launch.ranks.world import Store, StoreTimeout, open_store

_TIMEOUT_S = 120.0
_ENDED = "ended after "
_OWN = str(Path(__file__).parents[1]) + os.sep


class ScriptFailed(Exception):  # noqa: N818 - what failed is the script
    """The script ended by an error of its own, or by an exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text  # its traceback, as Python would print it; empty for an exit code
        self.steps = 0  # optimizer steps that it took
        self.profile: Any = None  # what was measured until then, if that was enough

    def summary(self, script: Path) -> str:
        """Return the line to show below the script's own error."""
        ending = f"ended with exit code {self.code}"
        if isinstance(self.__cause__, Done | Exception):
            was_ended = isinstance(self.__cause__, Done)
            ending = "was ended by SIGTERM" if was_ended else "ended with an error"
        until = "the profile covers what was measured until then"
        measured = until if self.profile is not None else "nothing was measured"
        return f"{script.name} {ending} after {count(self.steps, 'step')}: {measured}."


class Done(BaseException):
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
        answered = self._get(key, "for rank 0 to take as many optimizer steps as this rank")
        if answered.startswith(_ENDED):
            raise RankZeroEnded(int(answered.removeprefix(_ENDED)))
        return int(answered)

    def end(self, steps: int) -> None:
        """Tell the other ranks, as the next answer, that rank 0 has ended after this many steps."""
        if self.world_size > 1 and self.rank == 0:
            self._put(f"answer-{self._answers + 1}", f"{_ENDED}{steps}")

    def gather(self, text: str) -> list[str]:
        """Return each rank's text, in rank order, on rank 0; on other ranks an empty list."""
        if self.rank != 0:
            self._put(f"gathered-{self.rank}", text)
            return []
        others = range(1, self.world_size)
        return [text, *(self._get(f"gathered-{r}", f"for the profile of rank {r}") for r in others)]

    def share(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        if self.rank:
            return self._get("shared", "for rank 0 to prepare")
        if self.world_size > 1:
            self._put("shared", text)
        return text

    def leave(self) -> None:
        """Leave the store once all ranks are here, so that the script can listen at its address."""
        self.gather("")
        self._store = None

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
            f"{self._launch.master_addr}:{self._launch.master_port}. Start all {self.world_size} "
            "ranks at once; all must take the same number of optimizer steps."
        )


def run_script(script: Path, arguments: list[str], *, module: bool) -> None:
    """Run a script as `python script.py …` or `python -m module …` does, until `Done`."""
    before, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(Path.cwd() if module else script.parent.resolve()))
    resume_collections()  # garbage collection is measured too
    try:
        if module:
            runpy.run_module(str(script), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")
    except Done:
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
    """Return a traceback without our frames: those before the script, and those of our hooks."""
    trace = error.__traceback__
    own = str(script)
    while trace is not None and trace.tb_frame.f_code.co_filename != own:
        spec = trace.tb_frame.f_globals.get("__spec__")
        if spec is not None and spec.name in (own, f"{own}.__main__"):
            break
        trace = trace.tb_next
    trace = None if isinstance(error, SyntaxError) else trace or error.__traceback__
    report = traceback.TracebackException.from_exception(error.with_traceback(trace))
    chain: traceback.TracebackException | None = report
    while chain is not None:
        frames = [frame for frame in chain.stack if not frame.filename.startswith(_OWN)]
        chain.stack = traceback.StackSummary.from_list(frames)
        chain = chain.__cause__ or chain.__context__
    return "".join(report.format())


@contextmanager
def to_stderr() -> Iterator[None]:
    """Send what is printed inside, also by C code, to standard error."""
    sys.stdout.flush()
    standard_output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(standard_output, 1)
        os.close(standard_output)
