"""`samestep verify`: is it the same training on one process and on many?"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import tyro
from rich.console import Console

from samestep.commands.help import examples
from samestep.commands.target import (
    check_named,
    general_help,
    names_given,
    parse,
    refuse_inside_launcher,
)
from samestep.errors import UserError
from samestep.execution.request import Request
from samestep.ranks.failure import die_with_parent, rank_of, report
from samestep.ranks.process import run_as_rank
from samestep.ranks.start import Ended, run_ranks
from samestep.ranks.world import abandon, find_world, join, leave
from samestep.recipe import Accepted, nearest
from samestep.settings import Settings, flag_name
from samestep.verification.exchange import StartInstructions, read_left
from samestep.verification.in_parent import INSTRUCTIONS_FILE, gather, judge_evidence
from samestep.verification.on_rank import run_start
from samestep.verification.result_output import as_json, show
from samestep.verification.rows.one_writer import watch_output

_EXAMPLES = """\
examples:
  samestep verify spiral
  samestep verify my_recipe.py --world-sizes 1,2,4 --accept batchnorm --json
"""
_ABOUT = (
    "Train a recipe's own model and data for a few steps on one process and on several ranks, and "
    "compare: losses, gradients, weights, samples, metrics. What differs is named with its likely "
    "cause. Exit codes: 0 the same training, 1 different (or every rank writes a file), 2 a "
    "mistake in the command or the recipe."
)
# What a verification decides by itself, or has no use for.
_NO_EFFECT = frozenset(
    {
        *("run_dir", "epochs", "max_steps", "accumulate", "engine", "compile", "log_every"),
        *("eval_every_epochs", "eval_every_steps", "checkpoint_every_epochs", "monitor", "mode"),
        *("checkpoint_every_steps", "checkpoint_every_minutes", "keep_top_k", "patience"),
        "min_delta",
    }
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
    accept: str = ""
    """What may differ by intent, beside what the recipe accepts: batchnorm, dropout, or both."""
    tolerance: float | None = None
    """Compare losses alone, up to this relative difference: for what is random by intent."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of the table."""


def main(arguments: list[str]) -> int:
    """Run the verb: 0 the same, 1 different, 2 a mistake in the command or the recipe."""
    if instructions := os.environ.get(INSTRUCTIONS_FILE):
        return _rank(arguments, Path(instructions))
    return run_as_rank(lambda _log: _verify(arguments))


def _verify(arguments: list[str]) -> int:
    refuse_inside_launcher("samestep verify", "Start it alone, in a shell or a job of one task.")
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(general_help("verify", _ABOUT, _EXAMPLES))
        return 0 if arguments else 2
    target, *flags = arguments
    check_named(target, "verify")
    # What a recipe prints when it is read would stand before the JSON object.
    wants_help = bool({"-h", "--help"} & set(flags))
    with examples(_EXAMPLES), redirect_stdout(sys.stdout if wants_help else sys.stderr):
        command, request = _parse(target, flags)
    sizes, accepted = _parse_sizes(command.world_sizes), _accepted(command.accept)
    if command.tolerance is not None and not 0 < command.tolerance < float("inf"):
        raise UserError(f"--tolerance is {command.tolerance}; it must be greater than 0.")
    device, notes = _device(request.settings, max(sizes))
    request = replace(request, settings=replace(request.settings, device=device))
    started_at = time.time()

    def launch(num_ranks: int, path: Path) -> Ended:
        with _as_before():
            os.environ[INSTRUCTIONS_FILE] = str(path)
            return run_ranks(num_ranks, ["verify", *arguments, "--device", device], started_at)

    with _telling() as tell:
        evidence = gather(request, sizes, launch, batch=_batch(request, flags), tell=tell)
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


def _parse(target: str, flags: list[str]) -> tuple[Command, Request]:
    idle = ", --".join(flag_name(name) for name in sorted(_NO_EFFECT))
    about = (
        "Train {} for a few steps on one process and on several, and compare. "
        f"Without effect here: --{idle}."
    )
    command, request = parse(target, flags, verb="verify", about=about, kind=Command)
    without_effect = sorted(names_given(flags) & _NO_EFFECT)
    if without_effect:
        raise UserError(
            f"--{flag_name(without_effect[0])} has no effect on `samestep verify`, which chooses "
            "its own few steps. Leave it out."
        )
    return command, request


def _parse_sizes(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= _MOST_RANKS for word in words):
        raise UserError(
            f"--world-sizes {text}: give numbers of ranks from 1 to {_MOST_RANKS} with commas "
            "between them: 1,2,3."
        )
    return tuple(sorted({1, *(int(word) for word in words)}))


def _accepted(text: str) -> tuple[Accepted, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = list(get_args(Accepted))
    for word in words:
        if word not in known:
            raise UserError(
                f"--accept {text}: {word!r} is nothing that can be accepted. "
                f"{nearest(word, known)}There is: {', '.join(known)}."
            )
    return cast("tuple[Accepted, ...]", tuple(words))


def _batch(request: Request, flags: list[str]) -> int | None:
    """Return the global batch that was asked for on the command line, if one was."""
    given, settings = names_given(flags), request.settings
    if "global_batch_size" in given:
        return settings.global_batch_size
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


@contextmanager
def _as_before() -> Iterator[None]:
    """Take signals and variables back that are meant for the ranks and their agent."""
    from samestep.ranks.start import own_signals  # noqa: PLC0415 - imports the elastic agent

    variables = dict(os.environ)
    try:
        with own_signals():
            yield
    finally:
        os.environ.clear()
        os.environ.update(variables)


@contextmanager
def _telling() -> Iterator[Any]:
    """Show on a terminal what is being done."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda _text: None
        return
    with console.status("starting") as status:
        yield status.update


def _rank(arguments: list[str], path: Path) -> int:
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
    die_with_parent()
    try:
        _, request = _parse(arguments[0], arguments[1:])
        world, launch = find_world(request.settings.device, request.settings.backend)
        join(world, launch, _TIMEOUT_S)
        run_start(request, instructions, folder, world, output)
        leave(world)
    except Exception as error:
        code = report(error)
        abandon(code)
        return code
    sys.stdout.flush()
    # All is written; to take PyTorch's modules apart would cost every rank another second.
    os._exit(0)
