"""Train on ranks that are started for it, and show here what rank 0 tells."""

import json
import tempfile
import threading
from pathlib import Path

from samestep.api.as_rank import Shows
from samestep.api.asked import Asked
from samestep.api.sent import Sent, send
from samestep.ranks.start import Ended, run_ranks

_LOOK_EVERY_S = 0.1


def train_on_ranks(number: int, asked: Asked, screen: Shows) -> tuple[Path | None, Ended]:
    """Train on new ranks; return the run directory, if it came to that, and how they ended.

    Raises:
        UserError: the recipe holds something that cannot be sent to another process.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        call, records = Path(folder, "call"), Path(folder, "records.jsonl")
        send(Sent(asked=asked, records=records), call)
        follower = _Follower(records, screen)
        with screen:
            try:
                ended = run_ranks(number, ["train"], str(call))
            finally:
                follower.end()
    return follower.path, ended


class _Follower:
    """A thread that shows records as rank 0 leaves them, while this one waits for the ranks."""

    def __init__(self, file: Path, screen: Shows) -> None:
        self.path: Path | None = None
        """The run directory, once it is known."""
        self._file, self._screen, self._ended = file, screen, threading.Event()
        self._thread = threading.Thread(target=self._follow, name="samestep-screen", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Show what is left, and end."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        read, last = 0, False
        while not last:
            last = self._ended.wait(_LOOK_EVERY_S)
            if not self._file.exists():
                continue
            with self._file.open("rb") as file:
                file.seek(read)
                whole, newline, _ = file.read().rpartition(b"\n")
            read += len(whole) + len(newline)
            for line in whole.splitlines():
                record = json.loads(line)
                if record["event"] == "start":
                    self.path = Path(record["run_dir"])
                self._screen.show(record)
