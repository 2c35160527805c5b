"""What each tracker has of a run: kept in the run directory, so that nothing is sent twice."""

import secrets
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from samestep.errors import UserError
from samestep.run.files import write_text

FOLDER = "tracking"
"""In a run directory: what was sent, a log and a folder of files, for each tracker."""


@dataclass(kw_only=True)
class Delivery:
    """What one place has of a run."""

    run: str | None = None
    """The tracker's own name of the run."""
    link: str | None = None
    lines: int = 0
    """How many lines of events.jsonl it has, or was found to need nothing of."""
    system_lines: int = 0
    """How many of system.jsonl."""
    finished: bool = False
    """Whether the tracker closed the run, and so has all of these."""
    checkpoints: bool = False
    """Whether the checkpoints were sent with it."""
    files: list[str] = field(default_factory=list)
    """Its files that are whole, where they count only once they are closed."""


@dataclass(kw_only=True)
class Deliveries:
    """What one tracker has of a run: its service, and its files in the run directory."""

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    online: Delivery = field(default_factory=Delivery)
    offline: Delivery = field(default_factory=Delivery)


def deliveries_path(run: Path, tracker: str) -> Path:
    """Return where it is kept what a tracker has."""
    return run / FOLDER / f"{tracker}.json"


def read_deliveries(run: Path, tracker: str) -> Deliveries:
    """Return what a tracker has of a run: nothing if no file tells.

    Raises:
        UserError: it is damaged, so nobody knows what was sent.
    """
    path = deliveries_path(run, tracker)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Deliveries)
    except FileNotFoundError:
        return Deliveries()
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}), so it is not known what {tracker} has of this run. "
            "Look there; remove the file to send the whole run to a new one."
        ) from error


def write_deliveries(run: Path, tracker: str, deliveries: Deliveries) -> None:
    """Write what a tracker has, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(deliveries), indent=2)
    write_text(deliveries_path(run, tracker), text.decode() + "\n")
