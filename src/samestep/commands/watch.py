"""`samestep watch`: the page of a run while it trains, on this machine alone."""

import sys
import webbrowser
from dataclasses import dataclass

from samestep.commands.help import RunPath, Switch, parse_flags
from samestep.errors import UserError
from samestep.reporting.server import RunServer

_EXAMPLES = ("watch runs/ID", "watch runs/ID --port 0 --open")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Show the page of a run in the browser, and redraw it while the run goes on."""

    run: RunPath
    """Directory of the run."""
    port: int = 8008
    """Port on 127.0.0.1; 0 takes any that is free."""
    open: Switch = False
    """Open the page in the browser."""


def main(arguments: list[str]) -> int:
    """Run the verb until it is interrupted."""
    command = parse_flags(Command, "watch", arguments, *_EXAMPLES)
    if not 0 <= command.port < 2**16:
        raise UserError(f"--port is {command.port}; it must be from 0 to 65535.")
    with RunServer(command.run, command.port) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        if command.open:
            webbrowser.open(server.url)
        server.serve_forever()
    return 0
