"""Unpack a verified archive: each file gets its name whole, and none lands outside the folder."""

import filecmp
import tarfile
import tempfile
from pathlib import Path

from samestep.errors import UserError


def unpack(archive: Path, folder: Path) -> None:
    """Bring the files of a tar archive into a folder; those that are there and right stay.

    Raises:
        UserError: it is no archive, or it holds something that may not be unpacked: a path that
            leads out of the folder, a device, a link to elsewhere.
        OSError: the folder takes no more files.
    """
    if not hasattr(tarfile, "data_filter"):
        raise UserError("To unpack archives safely, Python 3.11.4 or newer is needed.")
    try:
        # In the folder itself, so that a file is renamed within one file system.
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as place,
            tarfile.open(archive) as tar,
        ):
            tar.extractall(place, filter="data")
            for new in sorted(path for path in Path(place).rglob("*") if path.is_file()):
                final = folder / new.relative_to(place)
                if final.is_file() and filecmp.cmp(new, final, shallow=False):
                    continue
                final.parent.mkdir(parents=True, exist_ok=True)
                new.replace(final)
    except (tarfile.TarError, EOFError) as problem:
        raise UserError(
            f"{archive} cannot be unpacked: {problem}. Delete it and download it again."
        ) from problem
