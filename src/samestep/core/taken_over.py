"""A training script run as the main program, up to the call by which it would train."""

import ast
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType

from samestep.base.errors import UserError, is_users
from samestep.base.patches import Patch, patched
from samestep.core.recipe_checks import take_script_words

_MORE = re.compile(
    r"\.(train|fit|test|validate|evaluate|predict|save_model|save_pretrained|save_checkpoint)\("
)


class TrainingReached(BaseException):
    """Ends the script where it would train; no `except Exception` of it keeps that."""


@contextmanager
def until_training(
    module: ModuleType, path: Path, patches: Sequence[Patch], call: str
) -> Iterator[str]:
    """Run a script within this, as the main program, until a patch raises `TrainingReached`.

    It sees the arguments after `--`, which are yielded as text: the others are samestep's. `call`
    names what it has to call, as "a Trainer's train()".

    Raises:
        UserError: it ends itself before that.
    """
    name, arguments, module.__name__ = module.__name__, sys.argv, "__main__"
    words = take_script_words()
    sys.argv = [str(path), *words]
    run_with = " ".join(words) or "no arguments"
    try:
        with patched(*patches):
            yield run_with
    except TrainingReached:
        pass
    except SystemExit as error:
        raise UserError(
            f"{path}, run with {run_with}, called exit({error.code or ''}) before {call}.",
            remedy="If it needs arguments of its own, give them after --: samestep train "
            f"{path} -- …",
        ) from error
    finally:
        sys.argv, module.__name__ = arguments, name
    for own in vars(module).values():
        # Loader workers look a class up where it says that it is.
        if getattr(own, "__module__", "") == "__main__" and isinstance(own, type):
            own.__module__ = name


def note_on_the_rest(trainer: object, called: FrameType, call: str) -> tuple[str, ...]:
    """Return a note on what a script does below the call, which is not run."""
    while called.f_back and called.f_locals.get("self") is trainer:  # a method of its class
        called = called.f_back
    file, line = called.f_code.co_filename, called.f_lineno
    if loop := _loop_around(called):
        note = f"The script calls {call} in the loop at {loop}: only the first training is run. "
        return (f"{note}Choose another by an argument of the script, or use samestep sweep.",)
    if not _MORE.search("".join(linecache.getlines(file)[line:])):
        return ()
    note = f"The script runs up to {call} at {Path(file).name}:{line}: what follows it is not run. "
    return (f"{note}samestep.load(run, checkpoint='best') returns the trained model.",)


def _loop_around(frame: FrameType | None) -> str:
    """Return the place of the script's loop that a frame is in."""
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
        for loop in (node for node in nodes if isinstance(node, ast.For | ast.While)):
            inside = loop.body[0].lineno <= line <= (loop.end_lineno or 0)
            if inside and is_users(file):  # not that of Fire, or of asyncio
                return f"{Path(file).name}:{loop.lineno}"
        frame = None if frame.f_code.co_name == "<module>" else frame.f_back
    return ""
