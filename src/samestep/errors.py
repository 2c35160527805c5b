"""The one error that a user's mistake raises; the command line turns it into exit code 2."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

# What a rank meets when another one is gone: an effect, never the cause.
LOST_PEER = re.compile(
    r"closed by peer|connection (reset|refused|was closed)|broken pipe|gloo|nccl", re.IGNORECASE
)


# What PyTorch raises where a device has no memory left, and where --deterministic cannot be had.
_NO_MEMORY = re.compile(r"out of memory|_ALLOC_FAILED|DefaultCPUAllocator: can't allocate")
_NOT_DETERMINISTIC = re.compile(r"not have a deterministic implementation|CUBLAS_WORKSPACE_CONFIG")
_LESS_MEMORY = (
    "Use less memory: a smaller --micro-batch-size (the same training in more micro-steps), "
    "--precision bf16, --checkpoint-activations if the model marks blocks; "
    "in an evaluation, --eval-batch-size. See that nothing else runs on this device. Where much is "
    "reserved but unallocated, PYTORCH_ALLOC_CONF=expandable_segments:True helps."
)


class UserError(Exception):
    """A mistake in what the user asked for or in where they asked for it.

    The message is all that the user sees, so it says what is wrong, where, and what to do.
    """

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks
        """Whether every rank raises it by agreement, so that rank 0 alone needs to tell."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the message is all that the user needs."""
        return [f"samestep: {self}"]


class AlreadyTold(SystemExit):
    """The command ends with this exit code, and the user knows why."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Run code of the user's; a call of `exit()` in it is a mistake.

    Raises:
        UserError: it was called.
    """
    try:
        yield
    except AlreadyTold:
        raise
    except SystemExit as error:
        import traceback  # noqa: PLC0415 - it is needed after a mistake only

        frames = traceback.extract_tb(error.__traceback__)
        frame = [f for f in frames if "_sitebuiltins" not in f.filename][-1]  # exit() is there
        code = "" if error.code is None else repr(error.code)
        raise UserError(
            f"exit({code}) was called at {frame.filename}:{frame.lineno}. A recipe must not end "
            "the process: other ranks may be waiting for it. Raise an error there instead."
        ) from error


# What other tools and scripts call a setting, where the letters do not lead to it.
_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "learningrate", "base_lr"), "lr"),
    **dict.fromkeys(("bs", "train_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("num_train_epochs", "n_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("grad_clip", "gradient_clip_val", "max_grad_norm"), "clip_norm"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "accumulate"),
    **dict.fromkeys(("amp", "dtype", "mixed_precision"), "precision"),
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "random_seed": "seed",
}


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "Did you mean …? " for the closest of some names, or nothing."""
    import difflib  # noqa: PLC0415 - it is needed after a mistake only

    names = [*names]
    meant = known_elsewhere(name, names)
    close = [meant] if meant else difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? " if close else ""


def known_elsewhere(name: str, names: Collection[str]) -> str | None:
    """Return which of some names other tools and scripts call so, if any."""
    meant = _ELSEWHERE.get(name.replace("-", "_").lower())
    return meant if meant in names else None


def listed(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def blame(what: str, error: Exception, *makers: object, remedy: str = "") -> NoReturn:
    """Raise what the user is told of an error in their code, with the line of theirs it came from.

    Args:
        what: the beginning of the message: what failed, and on what.
        error: the error. A `UserError` is raised as it is, and so is the loss of another rank.
        makers: the user's functions that led to it, named where no line of theirs raised it.
        remedy: the end of the message: what to do.
    """
    if isinstance(error, UserError):
        raise error
    if isinstance(error, RuntimeError) and LOST_PEER.search(said(error)):
        raise error
    place = raised_at(error) or defined_at(*makers)
    if told := device_error(error, f"{what}: ", place):
        import traceback  # noqa: PLC0415 - it is needed after a mistake only

        traceback.clear_frames(error.__traceback__)  # what they hold is memory, too
        raise told from error
    raise UserError(f"{what}: {said(error)}{place}{remedy and f'. {remedy}'}") from error


def said(error: BaseException) -> str:
    """Return an error's kind and text, also where its own class cannot put it into words."""
    try:
        text = str(error).strip().rstrip(".")
    except Exception:  # it is the user's code
        text = ""
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__} (no message)"


_LINE = re.compile(r"\.py:\d")


@contextmanager
def made_by(*makers: object) -> Iterator[None]:
    """Let a refusal name a line of the user's: where their code raised it, or where these are."""
    try:
        yield
    except UserError as error:
        place = "" if _LINE.search(str(error)) else raised_at(error) or defined_at(*makers)
        if place:
            place = place.replace(" at", "").replace("(", "").rstrip(")")
            error.args = (f"{str(error).rstrip('.')}. See{place}.",)
        raise


def device_error(error: BaseException, what: str = "", place: str = "") -> UserError | None:
    """Return what the user is told where a device has no memory left, or no deterministic way.

    Args:
        error: any error; None is returned of one of another kind.
        what: the beginning of the message: what failed, and on what.
        place: what is told where no line of the user's is in the traceback.
    """
    if not isinstance(error, RuntimeError):
        return None
    # torch's own advice comes after its numbers, and names settings that samestep has not.
    text = re.split(r" If reserved but|, but you set|\n", str(error))[0].strip().rstrip(".")
    refused = is_not_deterministic(error)
    text += f"{_in_module(error) if refused else ''}{raised_at(error) or place}."
    if type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY.search(text):
        told = UserError(f"{what}{text} {_LESS_MEMORY}")
    elif refused:
        told = UserError(
            f"--deterministic: {what}{text} Use another operation there, or leave the setting out; "
            "--virtual-ranks needs it, too."
        )
    else:
        return None
    told.__cause__ = error
    return told


def file_error(error: BaseException) -> UserError | None:
    """Return what the user is told of a file that samestep, not their code, could not open."""
    if not isinstance(error, OSError) or error.filename is None or raised_at(error):
        return None
    told = UserError(
        f"{error.filename}: {error.strerror}. Correct the path, or see that this user may use it."
    )
    told.__cause__ = error
    return told


def _in_module(error: BaseException) -> str:
    """Return " in the module CLASS", the innermost one whose forward raised; else nothing."""
    found, step = "", error.__traceback__
    while step is not None:
        code, owner = step.tb_frame.f_code, step.tb_frame.f_locals.get("self")
        if code.co_name == "forward" and owner is not None:
            found = f" in the module {type(owner).__name__}"
        step = step.tb_next
    return found


def is_not_deterministic(error: BaseException) -> bool:
    """Whether PyTorch refused an operation that may give other bits each time."""
    return isinstance(error, RuntimeError) and bool(_NOT_DETERMINISTIC.search(str(error)))


def caused(error: Exception) -> Exception:
    """Return what a user's code raised, where a `UserError` tells of it; else the error itself."""
    while isinstance(error, UserError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def raised_at(error: BaseException) -> str:
    """Return " at FILE:LINE", the innermost line that is the user's; nothing if none is."""
    import traceback  # noqa: PLC0415 - it is needed after a mistake only

    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


_EXTRAS = {
    "datasets": "huggingface",
    "lightning": "lightning",
    "tokenizers": "huggingface",
    "torch_geometric": "graphs",
    "transformers": "huggingface",
}
"""Which extra of samestep brings a package."""


def what_to_install(error: Exception) -> str:
    """Return the command that installs a package which is missing, where it is known."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or name not in _EXTRAS:
        return ""
    return f"Install it: pip install 'samestep[{_EXTRAS[name]}]'. "


_METHODS = ("forward", "__getitem__", "__call__", "__iter__", "step", "__post_init__", "__init__")


def defined_at(*makers: object) -> str:
    """Return " (FILE:LINE)", where a user's function, class or object is written, or nothing.

    Of several it names each: " (model: FILE:LINE, data: FILE:LINE)".
    """
    found = {}
    for maker in makers:
        kind = maker if isinstance(maker, type) else type(maker)
        methods = (getattr(kind, name, None) for name in _METHODS)
        for function in (maker, getattr(maker, "func", None), *methods):
            code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
            if code is not None and is_users(code.co_filename):
                name = getattr(maker, "__name__", kind.__name__)
                found[f"{code.co_filename}:{code.co_firstlineno}"] = name
                break
    if len(found) == 1:
        return f" ({next(iter(found))})"
    return f" ({', '.join(f'{name}: {place}' for place, name in found.items())})" if found else ""


_LIBRARIES = (*(os.path.dirname(file) + os.sep for file in (__file__, os.__file__)), "<")  # noqa: PTH120


def is_users(file: str) -> bool:
    """Whether a file of a traceback is neither samestep's nor Python's nor installed."""
    installed = "site-packages" in file or "dist-packages" in file
    command = file.endswith(f"{os.sep}bin{os.sep}samestep")  # as pip installs it
    return not installed and not command and not file.startswith(_LIBRARIES)
