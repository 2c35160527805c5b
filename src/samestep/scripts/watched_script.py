"""Run a script as Python would, as a rank of a job, so that a hang of it is seen.

The script's own order of imports stays: PyTorch is watched from when the script imports it.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from samestep.base.errors import UserError
from samestep.launch.ranks import watched
from samestep.launch.ranks.launch import detect_launch
from samestep.launch.ranks.watcher import tell_mismatch
from samestep.launch.stall.pulse import Pulse

_OURS = (
    __file__,
    *(f"{os.sep}samestep{os.sep}{part}" for part in ("launch/stall", "base/patches.py")),
)
_for_good = ExitStack()


def main() -> None:
    """Run the script that the command line names, in place of this one."""
    del sys.argv[0]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).resolve().parent)
    pulse = _be_watched()
    module = ModuleType("__main__")
    file = os.path.abspath(script)  # noqa: PTH100 - as Python does
    module.__dict__.update(__file__=file, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    try:
        exec(compile(Path(script).read_bytes(), file, "exec"), module.__dict__)  # noqa: S102
    except Exception as error:
        if pulse is not None and (told := tell_mismatch(pulse.folder)):
            error.add_note(f"samestep: {told}")
        trace = None if isinstance(error, SyntaxError) else _without_ours(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _be_watched() -> Pulse | None:
    with suppress(UserError):  # of the launcher's variables, which the script may not need
        pulse = watched.watch_script(detect_launch(os.environ))
        if pulse is not None:
            sys.meta_path.insert(0, _AfterTorch(lambda: _watch(pulse)))
        return pulse
    return None


class _AfterTorch(MetaPathFinder):
    """Calls a function once PyTorch has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Find PyTorch as usual, to be loaded with what follows."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def load_and_go_on(module: ModuleType) -> None:
                load(module)
                self._then()

            loader.exec_module = load_and_go_on
        return spec


def _watch(pulse: Pulse) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415

    from samestep.launch.stall.collectives import watch_collectives  # noqa: PLC0415 - it imports torch

    def has_begun(*_: object) -> None:
        if pulse.phase[0]:
            pulse.turn_to("")

    _for_good.enter_context(watch_collectives(pulse, has_begun))
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        pulse.step(steps)

    register_optimizer_step_post_hook(count)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this module and of what notes collectives."""
    if trace is None:
        return None
    rest = _without_ours(trace.tb_next)
    if any(part in trace.tb_frame.f_code.co_filename for part in _OURS):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
