"""`samestep slurm submit`: hand in a recipe, a run or any script as a job."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, arg

from samestep.commands.help import examples
from samestep.errors import UserError
from samestep.run.files import write_text
from samestep.slurm.defaults import UncheckedOptions, apply_flags, defaults_files, read_defaults
from samestep.slurm.options import JobOptions
from samestep.slurm.script import JobScript, script_text
from samestep.slurm.submission import make_folder, make_script, submit, with_home_expanded
from samestep.slurm.workload import Workload, find_workload

_EXAMPLES = """\
examples:
  samestep slurm submit spiral --nodes 2 --gpus-per-node 8 --time 02:00:00 -- --epochs 50
  samestep slurm submit train.py --ntasks-per-node 4 --dry-run -- --my-flag 1
"""
_USAGE = """\
usage: samestep slurm submit TARGET [flags] [-- arguments of the training or the script]

TARGET is a recipe, a recipe file, the directory of a run to go on with, or any Python script.
`samestep slurm submit TARGET --help` shows all flags; values that stay the same stand in [slurm]
of samestep.toml, here or above, or in the user's config folder.
"""


@dataclass(frozen=True, kw_only=True)
class _Submit(UncheckedOptions):
    """What a job asks for, and what this command itself takes."""

    dry_run: Annotated[bool, FlagCreatePairsOff] = False
    """Print the script and hand nothing in."""
    script: Annotated[Path | None, arg(aliases=["-o"], metavar="FILE")] = None
    """Keep the script in a file, to edit and hand in with sbatch; hands nothing in."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"{_USAGE}\n{_EXAMPLES}")
        return 0 if arguments else 2
    target, *flags = arguments
    if target.startswith("-"):
        raise UserError(f"Name what to submit before {target}: a recipe, a run or a script.")
    cut = flags.index("--") if "--" in flags else len(flags)
    with examples(_EXAMPLES):
        command, options = _parse(target, flags[:cut])
    found = find_workload(target, flags[cut + 1 :], recipe_files())
    _check_training(found)
    job = make_script(found, with_home_expanded(options), Path.cwd())
    if command.dry_run or command.script is not None:
        return _keep(job, command)
    number, script = submit(job)
    sys.stdout.write(
        f"job     {number}\n"
        f"run     {_shown(found.run)}\n"
        f"script  {_shown(script)}\n\n"
        f"Watch it with: samestep slurm status {number}\n"
    )
    return 0


def recipe_files() -> list[str]:
    """Return the names of samestep's recipes without importing them, which needs torch."""
    folder = Path(__file__).parent.parent.parent / "recipes"
    return sorted(path.stem for path in folder.glob("[a-z]*.py"))


def _parse(target: str, flags: list[str]) -> tuple[_Submit, JobOptions]:
    files = defaults_files(Path.cwd())
    defaults = read_defaults(files)
    command = tyro.cli(
        _Submit,
        prog=f"samestep slurm submit {target}",
        description=f"Submit {target} as a job.",
        args=flags,
        default=_Submit(**vars(defaults)),
    )
    return command, apply_flags(defaults, command, files)


def _check_training(target: Workload) -> None:
    """Let a mistake in the training's flags show now, and not after hours in the queue."""
    if target.kind != "recipe":
        return
    from samestep.commands.train import parse  # noqa: PLC0415 - it imports torch

    _, _, _verb, what, *flags = target.command
    # Relative paths in the flags hold for the job too: it runs in this folder.
    parse(what, flags)


def _keep(job: JobScript, command: _Submit) -> int:
    """Print the script or write it to a file."""
    text = script_text(job)
    if command.script is None:
        sys.stdout.write(text)
        if not Path(job.run).is_dir():
            sys.stderr.write(
                f"Slurm opens the log in {job.run}, so make that folder before sbatch; "
                "`-o FILE` makes it.\n"
            )
        return 0
    make_folder(Path(job.run))
    write_text(command.script, text)
    if command.dry_run:
        sys.stdout.write(text)
    sys.stderr.write(f"Hand it in with: sbatch {command.script}\n")
    return 0


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
