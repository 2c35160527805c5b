"""`samestep verify`: is it the same training on one process and on many?"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from samestep.commands.help import Switch, check_positive, numbers
from samestep.commands.target import names_given, parse_target
from samestep.errors import UserError, did_you_mean
from samestep.execution.request import Request
from samestep.ranks.failure import TASK, rank_of
from samestep.ranks.limits import check_ranks
from samestep.ranks.process import refuse_inside_launcher, run_as_rank
from samestep.ranks.start import Ended, run_ranks
from samestep.ranks.world import find_world, join, leave
from samestep.recipe import Accepted
from samestep.settings import Settings
from samestep.verification.exchange import StartInstructions, read_left
from samestep.verification.in_parent import gather, judge_evidence
from samestep.verification.on_rank import run_start
from samestep.verification.result_output import as_json, show
from samestep.verification.rows.one_writer import watch_output

_EXAMPLES = ("verify spiral", "verify my_recipe.py --world-sizes 1,2,4 --accept batchnorm --json")
_ABOUT = (
    "Train {} for a few steps on one process and on several ranks, and compare: losses, gradients, "
    "weights, samples, metrics. What differs is named with its likely cause. Exit codes: 0 the "
    "same training, 1 different (or every rank writes a file), 2 a mistake in the command or the "
    "recipe. With --virtual-ranks nothing is held still, and all has to be equal to the last bit."
)
# What a verification decides by itself, or has no use for.
_NO_EFFECT = (
    *("run_dir", "epochs", "max_steps", "accumulate", "engine", "compile", "log_every"),
    *("eval_every_epochs", "eval_every_steps", "checkpoint_every_epochs", "monitor", "mode"),
    "timeout_s",
    *("checkpoint_every_steps", "checkpoint_every_minutes", "keep_top_k", "patience", "min_delta"),
)
_MOST_RANKS = 64
# A rank that waits for one that does something else is a finding, not a reason to wait long.
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Command:
    """What this command itself takes, beside the settings."""

    config: Path | None = None
    """TOML file of settings and options; flags win over it."""
    world_sizes: str = "1,2,3"
    """Numbers of ranks to compare; 1 is always among them."""
    quick: Switch = False
    """Leave out what takes longest: a third size of ranks (unless --world-sizes names it), the
    recipe's own precision, accumulation, resuming, Lightning, a checkpoint on one device."""
    accept: str = ""
    """What may differ by intent, beside what the recipe accepts: batchnorm, dropout, or both."""
    tolerance: float | None = None
    """Compare losses alone, up to this relative difference: for what is random by intent."""
    json: Switch = False
    """Print one JSON object in place of the table."""


def main(arguments: list[str]) -> int:
    """Run the verb: 0 the same, 1 different, 2 a mistake in the command or the recipe."""
    instructions = os.environ.get(TASK)
    run = _verify if instructions is None else partial(_rank, Path(instructions))
    return run_as_rank(lambda _log: run(arguments))


def parse(arguments: list[str]) -> tuple[Command, Request]:
    """Return the command and the request that a target and the flags after it make."""
    return parse_target("verify", _ABOUT, Command, arguments, *_EXAMPLES, no_effect=_NO_EFFECT)


def _verify(arguments: list[str]) -> int:
    refuse_inside_launcher("samestep verify", "Start it alone, in a shell or a job of one task.")
    command, request = parse(arguments)
    given = names_given(arguments)
    sizes = _sizes(command, request.settings.virtual_ranks, chosen="world_sizes" in given)
    insists = request.settings.oversubscribe
    check_ranks(max(sizes), oversubscribe=insists, flag="--world-sizes")
    accepted = _accepted(command.accept)
    check_positive(tolerance=command.tolerance)
    if request.settings.virtual_ranks is not None:
        _check_strict(command)
    device, notes = _device(request.settings, max(sizes))
    request = replace(request, settings=replace(request.settings, device=device))
    started_at = time.time()

    def launch(num_ranks: int, path: Path) -> Ended:
        return run_ranks(num_ranks, ["verify", *arguments, "--device", device], str(path))

    batch = _batch(request.settings, given)
    with _progress() as tell:
        evidence = gather(request, sizes, launch, batch=batch, quick=command.quick, tell=tell)
    found = judge_evidence(
        request,
        evidence,
        accept=accepted,
        tolerance=command.tolerance,
        notes=notes,
        seconds=time.time() - started_at,
    )
    if command.json:
        print(as_json(found))  # noqa: T201
    else:
        show(found, Console(highlight=False))
    return 0 if found.same else 1


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Show one line of progress on a terminal, elsewhere a line after each start of ranks."""
    console, began, last = Console(stderr=True, highlight=False), time.monotonic(), ""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)

    def tell(done: int, total: int, ranks: str) -> None:
        nonlocal last
        if console.is_terminal:
            said = f"{ranks}, start {done + 1} of {total}"
            bar.update(task, description=said, completed=done, total=total)
        elif done:
            seconds = time.monotonic() - began
            sys.stderr.write(f"{done} of {total} starts done: {last}, {seconds:.0f} s\n")
        last = ranks

    with bar if console.is_terminal else nullcontext():
        task = bar.add_task("starting", total=None)
        yield tell


def _sizes(command: Command, virtual: int | None, *, chosen: bool) -> tuple[int, ...]:
    """Return the numbers of ranks, of which virtual ranks allow none larger than theirs."""
    if chosen:
        sizes = numbers("world-sizes", command.world_sizes, most=_MOST_RANKS)
        if virtual is not None and max(sizes) > virtual:
            raise UserError(
                f"--virtual-ranks {virtual} is less than the {max(sizes)} ranks of --world-sizes "
                f"{command.world_sizes}: each rank computes one or more virtual ranks. Give at "
                f"least --virtual-ranks {max(sizes)}, or fewer ranks."
            )
        return sizes
    sizes = numbers("world-sizes", "1,2" if command.quick else command.world_sizes)
    return tuple(size for size in sizes if virtual is None or size <= virtual)


def _check_strict(command: Command) -> None:
    """Refuse what allows a difference: with virtual ranks there is none to be allowed."""
    for flag, value in (("accept", command.accept), ("tolerance", command.tolerance)):
        if value:
            raise UserError(
                f"--{flag} {value} does not go with --virtual-ranks, with which everything has to "
                "be equal to the last bit. Leave one of them out."
            )


def _accepted(text: str) -> tuple[Accepted, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    known = list(get_args(Accepted))
    for word in words:
        if word not in known:
            raise UserError(
                f"--accept {text}: {word!r} is nothing that can be accepted. "
                f"{did_you_mean(word, known)}There is: {', '.join(known)}."
            )
    return cast("tuple[Accepted, ...]", words)


def _batch(settings: Settings, given: set[str]) -> int | None:
    """Return the global batch that was asked for on the command line, if one was."""
    if "global_batch_size" in given:
        return settings.global_batch_size
    if "batch_size" not in given or settings.batch_size is None:
        return None
    return settings.batch_size * (settings.virtual_ranks or 1)


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


def _rank(path: Path, arguments: list[str]) -> int:
    """Run as one rank of a start; nothing of it reaches the screen."""
    folder, instructions = path.parent, read_left(path, StartInstructions)
    assert instructions is not None
    log = folder / f"start-{instructions.start.place}-rank-{rank_of()}.log"
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # Every rank needs it; to bring it in makes caches, which is not the recipe's doing.
    import torch._dynamo  # noqa: F401, PLC0415

    output = watch_output(folder)
    _, request = parse(arguments)
    settings = request.settings
    world = find_world(settings.device, settings.backend, oversubscribe=settings.oversubscribe)
    join(world, _TIMEOUT_S)
    run_start(request, instructions, folder, world, output)
    leave(world)
    sys.stdout.flush()
    # All is written; to take PyTorch's modules apart would cost every rank another second.
    os._exit(0)
