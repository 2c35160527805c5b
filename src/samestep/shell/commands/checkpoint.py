"""`samestep checkpoint`: list, verify and export the checkpoints of a run."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from samestep.base.errors import UserError
from samestep.base.run.directory import plain
from samestep.base.words import count, size
from samestep.shell.commands.help import CheckpointName, RunPath, Switch, inner_verb, parse_flags
from samestep.show.reporting.checkpoint_list import (
    checked_checkpoints,
    checkpoint_lines,
    listed_checkpoints,
)

_EXAMPLES = (
    "checkpoint list runs/ID",
    "checkpoint verify runs/ID",
    "checkpoint export runs/ID model.safetensors",
)
_VERBS = {
    "list": "show the step, metric and size of each, and which is best and last",
    "verify": "hash the files of every checkpoint, to find missing and damaged ones",
    "export": "write a checkpoint's weights to a file for other programs",
}


@dataclass(frozen=True, kw_only=True)
class _ListCheckpoints:
    """List the checkpoints of a run: step, metric, size, and which is best and last."""

    run: RunPath
    """Directory of the run."""
    json: Switch = False
    """Print one JSON array, with an object for each checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _VerifyCheckpoints:
    """Hash the files of every checkpoint of a run.

    The exit code is 1 if a file is missing or damaged.
    """

    run: RunPath
    """Directory of the run."""
    json: Switch = False
    """Print one JSON array, with an object for each checkpoint: path, step, problem."""


@dataclass(frozen=True, kw_only=True)
class _ExportWeights:
    """Write the weights of a checkpoint to a file for other programs.

    They are the weights that evaluations use: with --ema, the moving average.
    """

    run: RunPath
    """Directory of the run."""
    file: Annotated[Positional[Path | None], arg(metavar="FILE")] = None
    """File to write. Its name ends in .safetensors (needs samestep[safetensors]), .pt or .pth."""
    output: Annotated[Path | None, arg(aliases=["-o"], metavar="FILE")] = None
    """The same file, named by a flag."""
    checkpoint: CheckpointName = "best"
    """`best`, `last`, or the name of a file in checkpoints/."""
    force: Switch = False
    """Overwrite the file if it exists."""
    json: Switch = False
    """Print one JSON object."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    about = "List, verify and export the checkpoints of a run."
    verb, flags = inner_verb("checkpoint", about, _VERBS, arguments, *_EXAMPLES)
    if verb == "list":
        return _list(parse_flags(_ListCheckpoints, "checkpoint list", flags, *_EXAMPLES))
    if verb == "verify":
        return _verify(parse_flags(_VerifyCheckpoints, "checkpoint verify", flags, *_EXAMPLES))
    return _export(parse_flags(_ExportWeights, "checkpoint export", flags, *_EXAMPLES))


def _list(command: _ListCheckpoints) -> int:
    rows = listed_checkpoints(command.run)
    if command.json:
        sys.stdout.write(json.dumps(plain(rows)) + "\n")
    elif rows:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        sys.stdout.writelines(f"{line}\n" for line in checkpoint_lines(rows, width))
    else:
        sys.stdout.write(f"{command.run} has no checkpoint yet.\n")
    return 0


def _verify(command: _VerifyCheckpoints) -> int:
    found = []
    for one in checked_checkpoints(command.run):  # each may take seconds
        found.append(one)
        if not command.json:
            sys.stdout.write(f"{one['path']}  {one['problem'] or 'whole'}\n")
            sys.stdout.flush()
    damaged = sum(bool(one["problem"]) for one in found)
    if command.json:
        sys.stdout.write(json.dumps(found) + "\n")
    elif not found:
        sys.stdout.write(f"{command.run} has no checkpoint yet.\n")
    else:
        of = f"{damaged} of {count(len(found), 'checkpoint')}"
        sys.stdout.write(f"{of} damaged\n" if damaged else f"all {len(found)} whole\n")
    return int(damaged > 0)


def _export(command: _ExportWeights) -> int:
    import samestep  # noqa: PLC0415 - the others need no torch

    files = [file for file in (command.file, command.output) if file is not None]
    if len(files) != 1:
        raise UserError(
            f"Name one file to write, not {len(files)}: samestep checkpoint export {command.run} "
            "model.safetensors"
        )
    found = samestep.export(command.run, files[0], command.checkpoint, force=command.force)
    if command.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    what = f"{count(found['tensors'], 'tensor')}, {size(found['bytes'])}"
    sys.stdout.write(f"{found['file']}: {what}, from {found['checkpoint']}\n")
    if found["left_out"]:
        names = ", ".join(found["left_out"])
        sys.stdout.write(f"note    left out, since they are not tensors: {names}\n")
    return 0
