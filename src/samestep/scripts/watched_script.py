"""Run a script as Python would, as a rank of a job, so that a hang of it is seen.

The script's own order of imports stays: PyTorch is watched from when the script imports it.
"""

import itertools
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType, TracebackType

from samestep.base.errors import UserError
from samestep.base.patches import Patch, patched_when_imported
from samestep.launch.ranks import watched
from samestep.launch.ranks.launch import detect_launch
from samestep.launch.ranks.watcher import record_mismatch
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
        if pulse is not None and (mismatch := record_mismatch(pulse.folder)):
            error.add_note(f"samestep: {mismatch}")
        trace = None if isinstance(error, SyntaxError) else _without_ours(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _be_watched() -> Pulse | None:
    with suppress(UserError):  # of the launcher's variables, which the script may not need
        pulse = watched.watch_script(detect_launch(os.environ))
        if pulse is not None:
            after = {"torch": lambda _torch: _watch(pulse)}
            _for_good.enter_context(patched_when_imported(after))
        return pulse
    return None


def _watch(pulse: Pulse) -> list[Patch]:
    """Note collectives, backward passes and steps from now on; there is nothing more to patch."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415

    from samestep.launch.stall.collectives import watch_collectives  # noqa: PLC0415 - it imports torch

    def has_begun(*_: object) -> None:
        if pulse.phase[0]:
            pulse.turn_to("")

    _for_good.enter_context(watch_collectives(pulse, has_begun))
    steps = itertools.count(1)
    register_optimizer_step_post_hook(lambda *_: pulse.step(next(steps)))
    return []


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this module and of what notes collectives."""
    if trace is None:
        return None
    rest = _without_ours(trace.tb_next)
    if any(part in trace.tb_frame.f_code.co_filename for part in _OURS):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
