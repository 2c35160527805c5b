"""`samestep watch`: serve the page of a run to this machine's browser while it trains."""

import shlex
import sys
import time
import webbrowser
from pathlib import Path
from typing import Annotated

from samestep.base.errors import UserError
from samestep.base.flags import InShell
from samestep.base.nearby import nearby
from samestep.base.run.directory import is_run
from samestep.cluster.slurm.queue import find_job_or_run
from samestep.cluster.slurm.submission import is_script
from samestep.shell.commands.forms import verb
from samestep.show.reporting.page import RunServer

_PATIENCE_S, _POLL_EVERY_S = 60.0, 0.2


@verb("watch", "watch runs/ID", "watch runs/ID --port 0 --open")
def main(
    run: Annotated[Path, InShell("RUN|JOB")],
    *,
    port: int = 8008,
    open: bool = False,  # noqa: A002 - the flag
) -> int:
    """Serve the report of a run as a page for the browser, updated while the run trains.

    Args:
        run: Directory of the run, or the number of its Slurm job.
        port: Port on 127.0.0.1; 0 takes any free port.
        open: Open the page in the browser.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"--port is {port}; it must be from 0 to 65535.")
    if str(run).replace("_", "").isdigit() and not run.exists():
        run = find_job_or_run(str(run)).run or run
    if not is_run(run) and not (run / "events.jsonl").is_file():
        until = time.monotonic() + _PATIENCE_S
        sys.stderr.write(f"Waiting {_PATIENCE_S:.0f} s for {run} to start.{nearby(run, 'run')}\n")
        while not is_run(run) and time.monotonic() < until:
            time.sleep(_POLL_EVERY_S)
        if not is_run(run) and (run / "job.sbatch").is_file():
            shown = shlex.quote(str(run))
            writes = "script has no records" if is_script(run) else "job has not started to train"
            raise UserError(
                f"{run} has no page: its {writes}. See its state with `samestep slurm status "
                f"{shown}`, and its output with `samestep slurm logs {shown}`."
            )
    with RunServer(run, port) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        if open:
            webbrowser.open(server.url)
        server.serve_forever()
    return 0
