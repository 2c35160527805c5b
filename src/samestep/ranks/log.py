"""Rank 0 alone uses the screen: what another rank prints goes to its own log in the run."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO


class RankLog:
    """Where one rank's output goes.

    Redirected at the level of file descriptors, so that output of libraries in C is caught too.
    Until the run directory is known, it is kept in a temporary file.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.path: Path | None = None
        self.terminal = 2
        """File descriptor of what the user sees of standard error."""
        self._early: IO[bytes] | None = None
        self._usual: list[int] = []
        if rank != 0:
            self._usual = [os.dup(1), os.dup(2)]
            self.terminal = self._usual[1]
            self._early = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the rank
            self._redirect(self._early.fileno())

    def move_to(self, run: Path) -> None:
        """Keep the log in a run directory from here on."""
        self.path = run / f"rank-{self.rank}.log"
        if self._early is None:
            return
        with self.path.open("ab") as log:
            self._flush()
            self._early.seek(0)
            shutil.copyfileobj(self._early, log)
            log.flush()
            self._redirect(log.fileno())
        self._early.close()
        self._early = None

    def give_back(self) -> None:
        """Print again where this process printed before; nothing follows of this rank."""
        if not self._usual:
            return
        self._flush()
        for descriptor, usual in zip((1, 2), self._usual, strict=True):
            os.dup2(usual, descriptor)
            os.close(usual)
        self._usual, self.terminal = [], 2

    def _redirect(self, descriptor: int) -> None:
        self._flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)

    def _flush(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
