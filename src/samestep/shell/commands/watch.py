"""`samestep watch`: serve the page of a run to this machine's browser while it trains."""

import shlex
import sys
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from samestep.base.errors import UserError
from samestep.base.nearby import nearby
from samestep.base.run.directory import is_run
from samestep.cluster.slurm.queue import find_job_or_run
from samestep.cluster.slurm.submission import is_script
from samestep.shell.commands.help import Switch, parse_flags
from samestep.show.reporting.page import RunServer

_PATIENCE_S, _LOOK_EVERY_S = 60.0, 0.2
_EXAMPLES = ("watch runs/ID", "watch runs/ID --port 0 --open")


@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """Serve the report of a run as a page for the browser, updated while the run trains."""

    run: Annotated[Positional[Path], arg(metavar="RUN|JOB")]
    """Directory of the run, or the number of its Slurm job."""
    port: int = 8008
    """Port on 127.0.0.1; 0 takes any free port."""
    open: Switch = False
    """Open the page in the browser."""


def main(arguments: list[str]) -> int:
    """Run the verb until it is interrupted."""
    command = parse_flags(WatchFlags, "watch", arguments, *_EXAMPLES)
    if not 0 <= command.port < 2**16:
        raise UserError(f"--port is {command.port}; it must be from 0 to 65535.")
    run = command.run
    if str(run).replace("_", "").isdigit() and not run.exists():
        run = find_job_or_run(str(run)).run or run
    if not is_run(run) and not (run / "events.jsonl").is_file():
        until = time.monotonic() + _PATIENCE_S
        sys.stderr.write(f"Waiting {_PATIENCE_S:.0f} s for {run} to begin.{nearby(run, 'run')}\n")
        while not is_run(run) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        if not is_run(run) and (run / "job.sbatch").is_file():
            shown = shlex.quote(str(run))
            writes = "script writes no records" if is_script(run) else "job has not begun to train"
            raise UserError(
                f"{run} has no page: its {writes}. See its state with `samestep slurm status "
                f"{shown}`, and its output with `samestep slurm logs {shown}`."
            )
    with RunServer(run, command.port) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        if command.open:
            webbrowser.open(server.url)
        server.serve_forever()
    return 0
