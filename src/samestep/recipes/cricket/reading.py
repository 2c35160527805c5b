"""A process that reads matches: a fresh interpreter, which ends with the one that started it.

Not a fork, since the training has threads, and not `multiprocessing`, which would run the user's
script again.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

import samestep
from samestep.errors import UserError
from samestep.recipes.cricket.corpus import Corpus, from_documents
from samestep.recipes.cricket.match_files import Document

# -P: nothing in the user's folder may pose as a package.
_PROGRAM = """\
import sys
sys.path.append(sys.argv.pop(1))
from samestep.recipes.cricket.reading import serve
serve()
"""
_COMMAND = (sys.executable, "-P", "-c", _PROGRAM, str(Path(samestep.__file__).parent.parent))


class Reader:
    """A process that reads one part after the other."""

    def __enter__(self) -> Self:
        """Start the process."""
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the one that waits
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def read(self, path: Path, documents: list[Document]) -> None:
        """Read documents into a part file.

        Raises:
            OSError: the file could not be written.
            UserError: the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((path, documents), self._process.stdin, protocol=5)
            self._process.stdin.flush()
            error = pickle.load(self._process.stdout)  # noqa: S301 - our own process
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as lost:
            code = self._process.wait()
            raise UserError(
                f"A process that read matches ended with exit code {code}; the system may have "
                "ended it for its memory. Start again: what was read is kept."
            ) from lost
        if error is not None:
            raise error


def save(corpus: Corpus, path: Path, folder: Path) -> None:
    """Write a file whole or not at all, in `folder` under a name of this process's own first."""
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        corpus.save(file)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    Path(file.name).replace(path)


def serve() -> None:
    """Read what comes on standard input until it ends."""
    while True:
        try:
            path, documents = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own parent
        except EOFError:
            return
        try:
            save(from_documents(documents), path, path.parent)
            answer = None
        except OSError as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
