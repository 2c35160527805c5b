"""`samestep track`: send a run to trackers after it was trained."""

import sys
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from tyro.conf import arg

from samestep.base.table import escape
from samestep.launch.ranks.process import print_error
from samestep.shell.commands.help import RunPath, Switch, parse_flags
from samestep.show.tracking.processes import send_run

_EXAMPLES = (
    "track runs/ID --to wandb",
    "track runs/ID --to comet,tensorboard --project spirals --tags paper,final",
)


@dataclass(frozen=True, kw_only=True)
class TrackFlags:
    """Send a run to trackers: each record once, and only what they do not have yet."""

    run: RunPath
    """Directory of the run."""
    to: Annotated[str, arg(metavar="NAMES")]
    """Trackers, separated by commas: comet, mlflow, tensorboard, wandb, or your own
    (my_tracker.py)."""
    project: str | None = None
    """Project at the tracker; by default the run's --track-project, else the recipe's name."""
    name: str | None = None
    """Name of the run at the tracker; by default the name of its directory."""
    workspace: str | None = None
    """Workspace at Comet, entity at W&B."""
    tags: Annotated[str | None, arg(metavar="TAGS")] = None
    """Tags of the run at the tracker, separated by commas."""
    offline: Switch = False
    """Write the tracker's files into the run directory and send nothing."""
    checkpoints: Switch = False
    """Also send the checkpoints, as artifacts."""
    timeout: float | None = None
    """Seconds to wait for a tracker to start and for each of its answers; by default 120."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    command = parse_flags(TrackFlags, "track", arguments, *_EXAMPLES)
    given = vars(command) | {"checkpoints": command.checkpoints or None}
    # `offline` counts even if it is off: the training may have been offline.
    overrides = {
        "track" if name == "to" else f"track_{name}": value
        for name, value in given.items()
        if name != "run" and value is not None
    }
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(f"[yellow]note[/]    {escape(text)}", soft_wrap=True)

    sent = send_run(command.run, overrides, say)
    for one in sent:
        if one.failed is not None:
            sys.stdout.flush()
            print_error(
                f"{one.name} failed: {one.failed}. The same command sends what is left; "
                "--offline writes files instead."
            )
        else:
            place = f"{'written to' if one.offline else 'sent to'} {one.link or one.name}"
            console.print(f"[bold]{escape(one.name):<7}[/] {escape(place)}", soft_wrap=True)
    return 1 if any(one.failed is not None for one in sent) else 0
