"""`samestep verify`: is it the same training on one process and on many?"""

import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from samestep.base.errors import UserError
from samestep.base.file_kinds import loop_of
from samestep.base.settings import flag_name
from samestep.base.words import duration
from samestep.launch.ranks.nproc import refuse_inside_launcher
from samestep.launch.ranks.process import TASK, rank_of, run_as_rank
from samestep.prove.verification import NO_EFFECT
from samestep.shell.api.on_ranks import run_verify, verify
from samestep.shell.commands.forms import Form, Switch, kind_of, parse, print_json, rich_console
from samestep.shell.commands.target import (
    canonical_flags,
    cut_at_dashes,
    names_given,
    parse_target,
    target_first,
)

_OLD_NAME = re.compile(r"^--world[-_]sizes(?==|$)")  # of --nproc: it is taken for one more release
# Ranks that wait for each other are a finding: verify reports them after this time.
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class VerifyFlags:
    """Train {} for a few steps on one process and on several ranks, and compare.

    It compares losses, gradients, weights, samples and metrics. Each difference is shown with its
    likely cause. With --virtual-ranks everything must be equal to the last bit, including random
    numbers.

    Exit codes: 0 the same training; 1 different, or ranks write the same file; 2 a user's mistake.

    A script with its own loop (samestep.open_run) takes its arguments after `--`.
    """

    json: Switch = False
    """Print one JSON object instead of the table."""


FORM = Form(
    verb="verify",
    kind=kind_of(verify, VerifyFlags, left_out=("what", "recipe", "arguments")),
    examples=(
        "verify spiral",
        "verify my_recipe.py --nproc 1,2,4 --accept batchnorm --json",
        "verify my_loop.py -- --epochs 3",
    ),
    settings=True,
    no_effect=NO_EFFECT,
)


def main(arguments: list[str]) -> int:
    """Return 0 for the same training, 1 for another, 2 for a mistake in command or recipe."""
    flags, words = cut_at_dashes(arguments)
    if len(flags) < len(arguments):
        words = ["--", *words]
    flags = [_OLD_NAME.sub("--nproc", flag) for flag in flags]
    arguments = [*target_first(flags, FORM.kind), *words]
    instructions = os.environ.get(TASK)
    run = _verify if instructions is None else partial(_rank, Path(instructions))
    return run_as_rank(lambda _log: run(arguments))


def _verify(arguments: list[str]) -> int:
    refuse_inside_launcher("samestep verify", "Start one process, in a shell or a job of one task.")
    script, (flags, words) = loop_of([*arguments, ""][0]), cut_at_dashes(arguments)
    request: Any = None
    if script is not None:
        verify_flags = {"nproc", "quick", "accept", "tolerance", "json", "help", "help_all"}
        if others := sorted(names_given(flags) - verify_flags):
            raise UserError(
                f"--{flag_name(others[0])} is not a flag of samestep verify for {script}, which "
                f"has a loop of its own. Its arguments follow `--`: samestep verify {script} -- …"
            )
        command = parse(FORM, flags[1:], str(script))
    else:
        command, request = parse_target(FORM, arguments)
    from samestep.prove.verification.result_table import as_table, show  # noqa: PLC0415 - it needs torch

    with _progress() as progress:
        verification = run_verify(
            script or request,
            lambda device: [*flags, "--device", device, *(["--", *words] if words else ())],
            command.nproc,
            quick=command.quick,
            accept=command.accept,
            tolerance=command.tolerance,
            explicit=names_given(canonical_flags(flags)),
            arguments=words,
            progress=progress,
        )
    if command.json:
        print_json(as_table(verification), indent=2)
    else:
        show(verification, rich_console())
    return 0 if verification.same else 1


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Show one line of progress on a terminal, elsewhere a line after each start of ranks."""
    console = rich_console(stderr=True)
    began = time.monotonic()
    last = ""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20))
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)

    def show_progress(done: int, total: int, ranks: str) -> None:
        nonlocal last
        if console.is_terminal:
            text = f"{ranks}, start {done + 1} of {total}"
            bar.update(task, description=text, completed=done, total=total)
        elif done:
            seconds = time.monotonic() - began
            sys.stderr.write(f"{done} of {total} starts done: {last}, {duration(seconds)}\n")
        last = ranks

    with bar if console.is_terminal else nullcontext():
        task = bar.add_task("starting", total=None)
        yield show_progress


def _rank(path: Path, arguments: list[str]) -> int:
    """Run as one rank of a start; its output goes to a log."""
    from samestep.launch.ranks.regroup import membership  # noqa: PLC0415
    from samestep.launch.ranks.world import find_world, join, leave  # noqa: PLC0415
    from samestep.prove.verification.loop_on_rank import LoopTask, run_script  # noqa: PLC0415
    from samestep.prove.verification.rows.one_writer import watch_output  # noqa: PLC0415
    from samestep.prove.verification.short_trainings import StartInstructions  # noqa: PLC0415
    from samestep.prove.verification.verify_recipe import run_start  # noqa: PLC0415
    from samestep.shell.api.call import CALL_FILE, receive, request_of  # noqa: PLC0415

    instructions: StartInstructions | LoopTask = pickle.loads(path.read_bytes())  # noqa: S301 - our own
    folder = instructions.folder
    log = folder / f"start-{instructions.start.place}-rank-{rank_of()}.log"
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # Import it now: its caches would otherwise be attributed to the recipe.
    import torch._dynamo  # noqa: F401, PLC0415

    output = watch_output(folder)
    if not isinstance(instructions, StartInstructions):
        run_script(instructions, output, log)
    if arguments[0] == CALL_FILE:  # by a caller in Python
        request = request_of(receive(Path(arguments[1])))
    else:
        _, request = parse_target(FORM, arguments)
    settings = request.settings
    world = find_world(settings.device, settings.backend, oversubscribe=settings.oversubscribe)
    member = membership(_TIMEOUT_S)
    if member is None:
        join(world, _TIMEOUT_S)
    run_start(request, instructions, world, output, member)
    if member is None:
        leave(world)
    sys.stdout.flush()
    # Everything is written. A normal exit would spend another second on PyTorch's teardown.
    os._exit(0)
