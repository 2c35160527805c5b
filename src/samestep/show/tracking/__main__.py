"""The process of one tracker, which `tracking.processes` starts and listens to."""

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from samestep.base.errors import UserError
from samestep.base.tracker_choice import secrets_of
from samestep.show.tracking.follower import Reports, follow_run
from samestep.show.tracking.processes import TrackerOrder, end_descendants

# None of it is the user's choice to make: noise, and reports to the trackers' makers, who cannot
# be reached from a compute node.
_QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "COMET_DISABLE_ANNOUNCEMENT": "1",
}


def main() -> int:
    """Follow the run of the order; return 0 if all was sent."""
    _stand_back()
    reports = Reports(secrets_of(os.environ))
    code = 1
    try:
        order = msgspec.convert(json.loads(sys.argv.pop()), TrackerOrder)  # not for the tracker
        follow_run(order, reports)
        code = 0
    except UserError as error:
        reports.tell(failed=str(error))
    except BaseException as error:  # whatever a tracker does, here it ends
        traceback.print_exc()
        first_line = str(error).strip().splitlines()[:1]
        reports.tell(failed=": ".join([type(error).__name__, *first_line]))
    reports.close()
    return code


def _stand_back() -> None:
    """Lower the priority, and ignore signals: the training says when to end."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(10)
        # Linux may weigh whole sessions against each other, and this is one of its own.
        Path("/proc/self/autogroup").write_text("10")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    exit_code = main()
    # Trackers leave threads and hooks that would hold up an ordinary exit, or send once more.
    end_descendants(os.getpid())
    sys.stdout.flush()
    os._exit(exit_code)
