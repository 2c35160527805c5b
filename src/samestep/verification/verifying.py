"""One verification from what was asked for to the answer: sizes, device, ranks, judgement."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch

from samestep.errors import UserError, did_you_mean
from samestep.ranks.nproc import check_ranks
from samestep.ranks.start import Ended
from samestep.recipe import Accepted
from samestep.session.request import Request
from samestep.settings import Settings
from samestep.verification.in_parent import Verification, gather, judge_evidence

# What a verification decides by itself, or has no use for.
NO_EFFECT = (
    *("run_dir", "epochs", "max_steps", "engine", "compile", "log_every"),
    *("batch_size_per_rank", "micro_batch_size", "accumulate"),
    *("eval_every_epochs", "eval_every_steps", "checkpoint_every_epochs", "monitor", "mode"),
    "timeout_s",
    *("checkpoint_every_steps", "checkpoint_every_minutes", "keep_top_k", "patience", "min_delta"),
)
MOST_RANKS = 64
_SIZES, _QUICK_SIZES = (1, 2, 3), (1, 2)

Launch = Callable[[int, Path, str], Ended]
"""(number of ranks, file of instructions, their device) → how they ended."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a verification is to look at."""

    sizes: tuple[int, ...] | None = None
    """Numbers of ranks; None for 1, 2 and 3, or fewer."""
    quick: bool = False
    accept: tuple[str, ...] = ()
    """What may differ by intent."""
    tolerance: float | None = None
    """Compare losses alone, up to this relative difference."""


def verify_request(
    request: Request,
    wanted: Wanted,
    launch: Launch,
    *,
    given: Collection[str],
    tell: Callable[[int, int, str], None] = lambda *_: None,
) -> Verification:
    """Train a recipe for a few steps on several numbers of ranks, and compare.

    Args:
        request: the recipe and the settings.
        wanted: what to look at.
        launch: starts ranks that call `run_start`.
        given: the names of the settings that were asked for.
        tell: is called with how many of how many starts are done, and the next one's ranks.

    Raises:
        UserError: it cannot be done, or the recipe cannot be trained in one process.
        KeyboardInterrupt: the ranks were stopped by a signal.
    """
    settings, started_at = request.settings, time.time()
    sizes = _sizes(wanted, settings.virtual_ranks)
    check_ranks(max(sizes), oversubscribe=settings.oversubscribe, flag="--world-sizes")
    accepted = _accepted(wanted)
    if settings.virtual_ranks is not None:
        _check_strict(wanted)
    device, notes = _device(settings, max(sizes))
    if idle := sorted({*given} & {*NO_EFFECT}):  # as train() takes them
        notes += (f"{', '.join(idle)}: no effect, since a verification chooses its own steps.",)
    request = replace(request, settings=replace(settings, device=device))
    evidence = gather(
        request,
        sizes,
        lambda number, path: launch(number, path, device),
        batch=_batch(settings, given),
        quick=wanted.quick,
        tell=tell,
    )
    return judge_evidence(
        request,
        evidence,
        accept=accepted,
        tolerance=wanted.tolerance,
        notes=notes,
        seconds=time.time() - started_at,
    )


def _sizes(wanted: Wanted, virtual: int | None) -> Sequence[int]:
    """Return the numbers of ranks, of which virtual ranks allow none larger than theirs."""
    if wanted.sizes is None:
        usual = _QUICK_SIZES if wanted.quick else _SIZES
        return [size for size in usual if virtual is None or size <= virtual]
    if virtual is not None and max(wanted.sizes) > virtual:
        raise UserError(
            f"--virtual-ranks {virtual} is less than the {max(wanted.sizes)} ranks of "
            f"--world-sizes {','.join(map(str, wanted.sizes))}: each rank computes one or more "
            f"virtual ranks. Give at least --virtual-ranks {max(wanted.sizes)}, or fewer ranks."
        )
    return wanted.sizes


def _check_strict(wanted: Wanted) -> None:
    """Refuse what allows a difference: with virtual ranks there is none to be allowed."""
    for flag, value in (("accept", ",".join(wanted.accept)), ("tolerance", wanted.tolerance)):
        if value:
            raise UserError(
                f"--{flag} {value} does not go with --virtual-ranks, with which everything has to "
                "be equal to the last bit. Leave one of them out."
            )


def _accepted(wanted: Wanted) -> tuple[Accepted, ...]:
    known = list(get_args(Accepted))
    for word in wanted.accept:
        if word not in known:
            raise UserError(
                f"--accept {','.join(wanted.accept)}: {word!r} is nothing that can be accepted. "
                f"{did_you_mean(word, known)}There is: {', '.join(known)}."
            )
    return cast("tuple[Accepted, ...]", wanted.accept)


def _batch(settings: Settings, given: Collection[str]) -> int | None:
    """Return the global batch that was asked for, if one was."""
    return settings.batch_size if "batch_size" in given else None


def _device(settings: Settings, top: int) -> tuple[Any, tuple[str, ...]]:
    """Return the device of all ranks, one GPU each or the CPU, and what to say of it."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.device == "cuda" and 0 < gpus < top:
        raise UserError(
            f"--device cuda: {top} ranks need a GPU each, and {gpus} are here. Use --device cpu, "
            f"or --world-sizes 1{',2' if gpus > 1 else ''}."
        )
    if settings.device != "auto":
        return settings.device, ()
    if gpus >= top or (top == 1 and torch.backends.mps.is_available()):
        return "auto", ()
    if gpus:
        return "cpu", (f"On the CPU: {top} ranks need a GPU each, and {gpus} are here.",)
    return "cpu", ()
