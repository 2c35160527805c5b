"""The error for a user's mistake (exit code 2), and how an error in the user's code is reported."""

import functools
import os
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

# Errors of a rank whose peer has gone: an effect, never the cause.
LOST_PEER = re.compile(
    r"closed by peer|connection (reset|refused|was closed)|broken pipe|gloo|nccl", re.IGNORECASE
)

_NO_MEMORY = re.compile(r"out of memory|_ALLOC_FAILED|DefaultCPUAllocator: can't allocate")
_NOT_DETERMINISTIC = re.compile(r"not have a deterministic implementation|CUBLAS_WORKSPACE_CONFIG")
_LESS_MEMORY = (
    "Use less memory: a smaller --micro-batch-size (the same training in more micro-steps), "
    "--precision bf16, --checkpoint-activations if the model marks blocks; "
    "in an evaluation, --eval-batch-size. Check that nothing else runs on this device. If much is "
    "reserved but unallocated, PYTORCH_ALLOC_CONF=expandable_segments:True helps."
)


class UserError(Exception):
    """A mistake in what the user asked for, or in where they asked for it.

    An error is data; each surface renders it once: the terminal by `str`, Python by `in_python`.
    A text names a setting as it is typed, `--batch-size`; `in_python` makes an argument of it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        remedy: str = "",
        flags: Sequence[str] = (),
        on_all_ranks: bool = False,
    ) -> None:
        super().__init__(what)
        self.what = what
        """What is wrong, with the value seen; the whole message where there is nothing else."""
        self.where = where
        """The file and line, the flag or the key."""
        self.remedy = remedy
        """A command or an edit that works if pasted."""
        self.flags = tuple(flags)
        """The settings that are wrong, by their field names."""
        self.on_all_ranks = on_all_ranks
        """Whether every rank raises it by agreement, so that only rank 0 reports it."""
        self.in_python = False
        """Whether a call in Python made the mistake: settings are then named as its arguments."""

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text = text.rstrip()
            sentence = text.endswith((".", "!", "?"))
            text = f"{text} See {self.where}." if sentence else f"{text} ({self.where})"
        if self.remedy:
            text = f"{text if text.endswith(('.', '!', '?')) else f'{text}.'} {self.remedy}"
        return _as_arguments(text) if self.in_python else text

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the message is all that the user needs."""
        return [f"samestep: {self}"]


# A whole command, in which flags stay as they are; or a flag elsewhere; or a cell of a notebook.
_FLAG = re.compile(r"\b(?:samestep|torchrun|pip) [a-z][^.;:]*|--(?P<flag>[a-z][a-z0-9-]+)")
_CELL = re.compile(
    r"(?P<file>[^\s(]*[/\\]ipykernel_\d+[/\\]\d+\.py|<ipython-input-[^>]+>):(?P<line>\d+)"
)


def _as_arguments(text: str) -> str:
    """Return a message as a caller in Python reads it: `lr=`'s name for `--lr`, cells by number."""

    def cell(place: re.Match[str]) -> str:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        named = shell and shell.compile.format_code_name(place["file"])
        return f"{named[1]} line {place['line']}" if named else place[0]

    def argument(place: re.Match[str]) -> str:
        name = (place["flag"] or "").replace("-", "_")
        return f"{name[3:]}=False" if name.startswith("no_") else name or place[0]

    return _FLAG.sub(argument, _CELL.sub(cell, text))


class AlreadyTold(SystemExit):
    """End with this exit code and say nothing more: the user knows why."""


@contextmanager
def no_sudden_exit() -> Iterator[None]:
    """Let `os._exit` of the user's code end this process as `exit` does: others would see code 0.

    Not that of processes it forks, nor of a thread of its own, such as one that ends what hangs.
    """
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def leave_noted(status: int) -> NoReturn:
        file = sys._getframe(1).f_code.co_filename  # noqa: SLF001
        if (os.getpid(), threading.get_ident()) == (process, thread) and is_users(file):
            raise SystemExit(status)
        leave(status)

    os._exit = leave_noted
    try:
        yield
    finally:
        if os._exit is leave_noted:
            os._exit = leave


@contextmanager
def no_exit() -> Iterator[None]:
    """Run the user's code; turn a call of `exit()` or `os._exit()` in it into a `UserError`."""
    try:
        with no_sudden_exit():
            yield
    except AlreadyTold:
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise UserError(
            f"exit({code}) was called{raised_at(error)}. A recipe must not end "
            "the process: other ranks may be waiting for it.",
            remedy="Raise an error there instead.",
        ) from error


# Names that other tools and scripts give to our settings.
_ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "learningrate", "base_lr"), "lr"),
    **dict.fromkeys(("bs", "train_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("num_train_epochs", "n_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("grad_clip", "gradient_clip_val", "max_grad_norm"), "clip_norm"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), "accumulate"),
    **dict.fromkeys(("amp", "dtype", "mixed_precision"), "precision"),
    **dict.fromkeys(("load_from", "pretrained", "initial_checkpoint"), "init_from"),
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "random_seed": "seed",
}
# What no setting of ours sets, and the field of a recipe that does.
_OF_A_RECIPE = {
    **dict.fromkeys(("betas", "eps", "amsgrad", "nesterov", "dampening"), "optimizer"),
    **dict.fromkeys(("gamma", "milestones", "step_size", "eta_min", "min_lr"), "schedule"),
}


_WORDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text in quotes",
    Path: "a path in quotes",
}


def in_words(kind: Any) -> str:
    """Return a declared type in words for a message, or an empty text."""
    inner = [part for part in get_args(kind) if part not in (type(None), ...)]
    if {*inner} == {int, float}:
        return _WORDS[float]
    if get_origin(kind) in (Union, UnionType, Annotated):
        return in_words(inner[0]) if get_origin(kind) is Annotated or len(inner) == 1 else ""
    if get_origin(kind) in (tuple, list):
        words = in_words(inner[0])
        return f"a list, each {words}" if words else ""
    return _WORDS.get(kind, "")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "Did you mean …? " with the closest of the names, or an empty text."""
    import difflib  # noqa: PLC0415 - only after a mistake

    names = [*names]
    if (field := _OF_A_RECIPE.get(name.lower())) in names:
        return f"Recipe({field}=…) sets it. "
    meant = known_elsewhere(name, names)
    within = [candidate for candidate in names if len(name) > 3 and name in candidate]
    # Below it a long name is another word; of two letters one may be wrong.
    cutoff = 0.0 if within else 0.6 if len(name) > 3 else 0.5
    close = difflib.get_close_matches(name, within or names, n=1, cutoff=cutoff)
    return f"Did you mean {(meant or close[0])!r}? " if meant or close else ""


def known_elsewhere(name: str, names: Collection[str]) -> str | None:
    """Return our name for a setting that other tools call by this name, or None."""
    meant = _ELSEWHERE.get(name.replace("-", "_").lower())
    return meant if meant in names else None


_MOVES = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_OF_LINES, _OF_TEXTS = re.compile(f"[{_MOVES}]"), re.compile(rf"(?![\n\t])[{_MOVES}]")


def printable(text: str, *, lines: bool = False) -> str:
    """Return a text without what would move the cursor or cannot be encoded.

    With `lines` it may have several, and tabs. Joiners and spaces of other scripts stay.
    """
    return (_OF_TEXTS if lines else _OF_LINES).sub("\ufffd", text)


def escape(text: str) -> str:
    """Return a text that rich prints as it is: no markup, and nothing that moves the cursor."""
    from rich.markup import escape as without_markup  # noqa: PLC0415 - tables need no rich

    return without_markup(printable(text, lines=True))


def listed(names: Sequence[str], most: int = 3, between: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def blame(what: str, error: Exception, *makers: object, remedy: str = "") -> NoReturn:
    """Raise a `UserError` for an error in the user's code, with the line of theirs that raised it.

    A `UserError` and the loss of another rank are raised as they are. The makers, the user's
    functions that led to it, are named if no line of theirs raised it.
    """
    lost = isinstance(error, RuntimeError) and LOST_PEER.search(error_text(error))
    if lost or isinstance(error, UserError):
        raise error
    place = raised_at(error) or defined_at(*makers)
    if known_error := device_error(error, f"{what}: ", place):
        import traceback  # noqa: PLC0415 - only after a mistake

        traceback.clear_frames(error.__traceback__)  # they hold tensors
        raise known_error from error
    remedy = known_remedy(error) or remedy
    raise UserError(f"{what}: {error_text(error)}{place}", remedy=remedy) from error


_KNOWN = {
    "backward through the graph a second time": "State kept from step to step holds the "
    "graph of the previous step: let Recipe(carry=…) carry it, or detach() it.",
    "does not require grad and does not have a grad_fn": "Evaluations run without gradients. If "
    "forward needs gradients, such as forces, compute them within `with torch.enable_grad():`"
    " from inputs that requires_grad_() has marked. A loss with a gradient penalty needs "
    "another for evaluations: Recipe(evaluation_loss=…).",
    "setStorage: sizes": "With --strategy fsdp, torch.autograd.grad in forward finds weights that "
    "are already freed. Use --strategy ddp.",
    "Expected sparse gradient to be defined": "--find-unused sends zeros for what a step leaves "
    "unused, and PyTorch has none for a sparse gradient. Build the layer with sparse=False.",
    "Expected more than 1 value per channel": "BatchNorm cannot train on one sample. Each rank, "
    "and each of its micro-steps, needs two: choose another --batch-size or --micro-batch-size, "
    "fewer ranks, or --drop-last.",
    "explicit nodesplitter": "Pass WebDataset(…, nodesplitter=None): samestep divides the "
    "elements among the ranks itself.",
}
"""Parts of errors of PyTorch and readers of data, and what to do about them."""


def known_remedy(error: BaseException) -> str:
    """Return what to do about an error of PyTorch whose text does not say it, or nothing."""
    text = error_text(error)
    return next((remedy for part, remedy in _KNOWN.items() if part in text), "")


def error_text(error: BaseException) -> str:
    """Return an error's class and text, even if its own `__str__` fails.

    A package with lazy imports, as transformers, says only which part failed: the cause is added.
    """
    try:
        text = str(error).strip().rstrip(".")
    except Exception:  # it is the user's code
        text = ""
    text = f"{type(error).__name__}: {text}" if text else f"{type(error).__name__} (no message)"
    cause = error
    while isinstance(error, ImportError) and cause.__cause__:
        cause = cause.__cause__
    return text if cause is error else f"{text}. Its cause: {error_text(cause)}"


_LINE = re.compile(r"\.py:\d")


@contextmanager
def made_by(*makers: object) -> Iterator[None]:
    """Add a line of the user's to a `UserError` without one: where it was raised, or the makers."""
    try:
        yield
    except UserError as error:
        if not error.where and not _LINE.search(str(error)):
            place = raised_at(error) or defined_at(*makers)
            error.where = place.replace(" at", "").replace("(", "").rstrip(")").strip()
        raise


def device_error(error: BaseException, what: str = "", place: str = "") -> UserError | None:
    """Return a `UserError` for a device without memory or a deterministic operation, else None.

    `what` begins the message; `place` is named if no line of the user's is in the traceback.
    """
    if not isinstance(error, RuntimeError):
        return None
    # Leave out torch's own advice: it names settings that samestep does not have.
    text = re.split(r" If reserved but|, but you set|\n", str(error))[0].strip().rstrip(".")
    refused = is_not_deterministic(error)
    text += f"{_in_module(error) if refused else ''}{raised_at(error) or place}."
    if type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY.search(text):
        user_error = UserError(f"{what}{text}", remedy=_LESS_MEMORY)
    elif refused:
        user_error = UserError(
            f"--deterministic: {what}{text}",
            remedy="Use another operation there, or leave the setting out; --virtual-ranks "
            "also needs it.",
            flags=["deterministic"],
        )
    else:
        return None
    user_error.__cause__ = error
    return user_error


def file_error(error: BaseException) -> UserError | None:
    """Return a `UserError` for a file that samestep, not the user's code, could not open."""
    if not isinstance(error, OSError) or error.filename is None or raised_at(error):
        return None
    user_error = UserError(
        f"{error.filename}: {error.strerror}.", remedy="Correct the path, or check the permissions."
    )
    user_error.__cause__ = error
    return user_error


def _in_module(error: BaseException) -> str:
    """Return " in the module CLASS" for the innermost `forward` that raised, or nothing."""
    where, step = "", error.__traceback__
    while step is not None:
        code, owner = step.tb_frame.f_code, step.tb_frame.f_locals.get("self")
        if code.co_name == "forward" and owner is not None:
            where = f" in the module {type(owner).__name__}"
        step = step.tb_next
    return where


def is_not_deterministic(error: BaseException) -> bool:
    """Whether PyTorch refused a nondeterministic operation."""
    return isinstance(error, RuntimeError) and bool(_NOT_DETERMINISTIC.search(str(error)))


def caused(error: Exception) -> Exception:
    """Return the error of the user's code that a `UserError` reports, or the error itself."""
    while isinstance(error, UserError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def raised_at(error: BaseException) -> str:
    """Return " at FILE:LINE" for the user's innermost line, or an empty text."""
    import traceback  # noqa: PLC0415 - only after a mistake

    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


_EXTRAS = {
    "datasets": "huggingface",
    "lightning": "lightning",
    "optuna": "optuna",
    "safetensors": "safetensors",
    "tokenizers": "huggingface",
    "torch_geometric": "graphs",
    "transformers": "huggingface",
}
"""Package → the extra of samestep that brings it."""


def what_to_install(error: Exception) -> str:
    """Return the command that installs a missing package, if an extra brings it."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"Install it: pip install 'samestep[{_EXTRAS[name]}]'. " if name in _EXTRAS else ""


_METHODS = ("forward", "__getitem__", "__call__", "__iter__", "step", "__post_init__", "__init__")


def defined_at(*makers: object) -> str:
    """Return " (FILE:LINE)" of the user's function, class or object, or an empty text.

    Several are named: " (model: FILE:LINE, data: FILE:LINE)".
    """
    names = {}
    for maker in (getattr(maker, "__wrapped__", maker) for maker in makers):
        kind = maker if isinstance(maker, type) else type(maker)
        methods = (getattr(kind, name, None) for name in _METHODS)
        for function in (maker, getattr(maker, "func", None), *methods):
            code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
            if code is not None and is_users(code.co_filename):
                name = getattr(maker, "__name__", kind.__name__)
                names[f"{code.co_filename}:{code.co_firstlineno}"] = name
                break
    shown = [*names] if len(names) == 1 else [f"{name}: {place}" for place, name in names.items()]
    return f" ({', '.join(shown)})" if names else ""


_PACKAGES = (os.path.dirname(__file__), os.__file__)  # noqa: PTH120
_LIBRARIES = (*(os.path.dirname(path) + os.sep for path in _PACKAGES), "<")  # noqa: PTH120


@functools.cache  # stacks are searched at every call of PyTorch that is watched
def is_users(file: str) -> bool:
    """Whether a file in a traceback is the user's: not samestep's, Python's or installed."""
    installed = "site-packages" in file or "dist-packages" in file
    command = file.endswith(f"{os.sep}bin{os.sep}samestep")  # as pip installs it
    return not installed and not command and not file.startswith(_LIBRARIES)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code, from a frame outwards."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def kind_of_data(data: Any) -> str:
    """Return the class and place of the user's data set, also of one that is wrapped here."""
    while type(data).__module__.startswith("samestep.") and hasattr(data, "dataset"):
        data = data.dataset
    return f"{type(data).__name__}{defined_at(data)}"
