"""`samestep track`: send a run to trackers after it was trained."""

import sys
from pathlib import Path
from typing import Annotated

from samestep.base.errors import escape
from samestep.base.flags import InShell
from samestep.launch.ranks.process import print_error
from samestep.shell.commands.forms import rich_console, verb
from samestep.show.tracking.processes import send_run


@verb(
    "track",
    "track runs/ID --to wandb",
    "track runs/ID --to comet,tensorboard --project spirals --tags paper,final",
)
def main(
    run: Annotated[Path, InShell("RUN")],
    *,
    to: Annotated[str, InShell("NAMES")],
    project: str | None = None,
    name: str | None = None,
    workspace: str | None = None,
    tags: Annotated[str | None, InShell("TAGS")] = None,
    offline: bool = False,
    checkpoints: bool = False,
    timeout: float | None = None,
) -> int:
    """Send a run to trackers: each record once, and only what they do not have yet.

    Args:
        run: Directory of the run.
        to: Trackers, separated by commas: comet, mlflow, tensorboard, trackio, wandb, or your own
            (my_tracker.py).
        project: Project at the tracker; by default the run's --track-project, else the recipe's
            name.
        name: Name of the run at the tracker; by default the name of its directory.
        workspace: Workspace at Comet, entity at W&B.
        tags: Tags of the run at the tracker, separated by commas.
        offline: Write the tracker's files into the run directory and send nothing.
        checkpoints: Also send the checkpoints, as artifacts.
        timeout: Seconds to wait for a tracker to start and for each of its answers; by default 120.
    """
    flags: dict[str, object] = {
        "track": to,
        "track_project": project,
        "track_name": name,
        "track_workspace": workspace,
        "track_tags": tags,
        "track_offline": offline,  # it counts if it is off, too: the training may have been offline
        "track_checkpoints": checkpoints or None,
        "track_timeout": timeout,
    }
    overrides = {setting: value for setting, value in flags.items() if value is not None}
    console = rich_console()

    def say(text: str) -> None:
        console.print(f"[yellow]note[/]    {escape(text)}", soft_wrap=True)

    sent = send_run(run, overrides, say)
    for tracker in sent:
        if tracker.failed is not None:
            sys.stdout.flush()
            print_error(
                f"{tracker.name} failed: {tracker.failed}. The same command sends what is left; "
                "--offline writes files instead."
            )
        else:
            place = "written to" if tracker.offline else "sent to"
            where = escape(f"{place} {tracker.link or tracker.name}")
            console.print(f"[bold]{escape(tracker.name):<7}[/] {where}", soft_wrap=True)
    return 1 if any(tracker.failed is not None for tracker in sent) else 0
