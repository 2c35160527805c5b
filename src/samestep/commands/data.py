"""`samestep data`: download a data set, or list those that can be downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import Positional, UseAppendAction, arg, subcommand

from samestep.commands.help import examples
from samestep.data.catalog import CATALOG
from samestep.data.download import download
from samestep.reporting.words import count, wrapped

_EXAMPLES = ("data list", "data get mnist --data-dir data/mnist")


@dataclass(frozen=True, kw_only=True)
class _Get:
    """Download a data set into a folder; files that are already correct are kept."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """The data set, one of those that `samestep data list` shows."""
    data_dir: Annotated[Path, arg(metavar="DIR")]
    """The folder for the files; created if missing."""
    mirror: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="URL")] = ()
    """URL of a folder with the files, used instead of the known mirrors."""


@dataclass(frozen=True, kw_only=True)
class _List:
    """Show the data sets that can be downloaded."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    with examples(*_EXAMPLES):
        command = tyro.cli(
            Annotated[_Get, subcommand(name="get")] | Annotated[_List, subcommand(name="list")],
            prog="samestep data",
            description="Download data sets.",
            args=arguments,
        )
    if isinstance(command, _Get):
        paths = download(command.name, command.data_dir, mirrors=command.mirror)
        files = count(len(paths), "file")
        print(f"{command.name} is in {command.data_dir}: {files}, checked.")  # noqa: T201
    else:
        width = Console().width
        for dataset in CATALOG.values():
            size = sum(file.size_bytes for file in dataset.files) / 1e6
            print(f"{dataset.name}  {count(len(dataset.files), 'file')}, {size:.1f} MB")  # noqa: T201
            for text in (dataset.description, dataset.licence, dataset.source):
                print("\n".join(wrapped(f"  {text}", "  ", width)))  # noqa: T201
    return 0
