"""Download a data set, verified by hash, or list the data sets."""

from pathlib import Path
from typing import Annotated

from rich.console import Console

from samestep.base.flags import InShell
from samestep.base.words import count, size, wrapped
from samestep.core.data.catalog import CATALOG
from samestep.core.data.download import download
from samestep.shell.commands.forms import verb

EXAMPLES = ("data list", "data get mnist --data-dir data/mnist")


@verb("data get", *EXAMPLES)
def get(
    name: Annotated[str, InShell("NAME")],
    *,
    data_dir: Annotated[Path, InShell("DIR")],
    mirror: Annotated[tuple[str, ...], InShell("URL", repeats=True)] = (),
) -> int:
    """Download a data set into a folder; files that are already correct are kept.

    Args:
        name: Name of the data set; `samestep data list` shows them all.
        data_dir: Folder for the files; created if missing.
        mirror: URL of a folder with the files, used instead of the known mirrors. Repeatable.
    """
    files = count(len(download(name, data_dir, mirrors=mirror)), "file")
    print(f"{name} is in {data_dir}: {files}, checked.")  # noqa: T201
    return 0


@verb("data list", *EXAMPLES)
def list_data_sets() -> int:
    """Show the data sets that can be downloaded."""
    width = Console().width
    for dataset in CATALOG.values():
        takes = size(sum(file.size_bytes for file in dataset.files))
        print(f"{dataset.name}  {count(len(dataset.files), 'file')}, {takes}")  # noqa: T201
        for text in (dataset.description, dataset.licence, dataset.source):
            print("\n".join(wrapped(f"  {text}", "  ", width)))  # noqa: T201
    return 0
