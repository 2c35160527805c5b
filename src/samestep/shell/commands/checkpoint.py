"""List, verify and export the checkpoints of a run."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from samestep.base.errors import UserError
from samestep.base.flags import InShell
from samestep.base.words import count, size
from samestep.shell.api.run_functions import export
from samestep.shell.commands.forms import print_json, print_lines, terminal_width, verb
from samestep.show.reporting.run_table import (
    checked_checkpoints,
    checkpoint_lines,
    listed_checkpoints,
)

EXAMPLES = (
    "checkpoint list runs/ID",
    "checkpoint verify runs/ID",
    "checkpoint export runs/ID model.safetensors",
)


@verb("checkpoint list", *EXAMPLES)
def list_checkpoints(run: Annotated[Path, InShell("RUN")], *, json: bool = False) -> int:
    """List the checkpoints of a run: step, metric, size, and which is best and last.

    Args:
        run: Directory of the run.
        json: Print one JSON array, with an object for each checkpoint.
    """
    rows = listed_checkpoints(run)
    if json:
        print_json(rows)
    elif rows:
        print_lines(checkpoint_lines(rows, terminal_width()))
    else:
        sys.stdout.write(f"{run} has no checkpoint yet.\n")
    return 0


@verb("checkpoint verify", *EXAMPLES)
def verify_checkpoints(run: Annotated[Path, InShell("RUN")], *, json: bool = False) -> int:
    """Hash the files of every checkpoint of a run.

    The exit code is 1 if a file is missing or damaged.

    Args:
        run: Directory of the run.
        json: Print one JSON array, with an object for each checkpoint: path, step, problem.
    """
    checked = []
    for checkpoint in checked_checkpoints(run):  # each may take seconds
        checked.append(checkpoint)
        if not json:
            sys.stdout.write(f"{checkpoint['path']}  {checkpoint['problem'] or 'intact'}\n")
            sys.stdout.flush()
    damaged = sum(bool(checkpoint["problem"]) for checkpoint in checked)
    if json:
        print_json(checked)
    elif not checked:
        sys.stdout.write(f"{run} has no checkpoint yet.\n")
    else:
        of = f"{damaged} of {count(len(checked), 'checkpoint')}"
        sys.stdout.write(f"{of} damaged\n" if damaged else f"all {len(checked)} intact\n")
    return int(damaged > 0)


@verb("checkpoint export", *EXAMPLES, of=export)
def export_weights(
    args: SimpleNamespace,
    file: Annotated[Path | None, InShell("FILE")] = None,
    *,
    output: Annotated[Path | None, InShell("FILE", short=("-o",))] = None,
    json: bool = False,
) -> int:
    """Write the weights of a checkpoint to a file for other programs.

    They are the weights that evaluations use: with --ema, the moving average.

    Args:
        args: what `samestep.export` takes, but for the file.
        file: File to write. Its name ends in .safetensors (needs samestep[safetensors]), .pt or
            .pth.
        output: The same file, named by a flag.
        json: Print one JSON object.
    """
    files = [path for path in (file, output) if path is not None]
    if len(files) != 1:
        raise UserError(f"Name one file: samestep checkpoint export {args.run} model.safetensors")
    written = export(file=files[0], **vars(args))
    if json:
        print_json(written)
        return 0
    contents = f"{count(written['tensors'], 'tensor')}, {size(written['bytes'])}"
    sys.stdout.write(f"{written['file']}: {contents}, from {written['checkpoint']}\n")
    if written["left_out"]:
        names = ", ".join(written["left_out"])
        sys.stdout.write(f"note    left out, since they are not tensors: {names}\n")
    return 0
