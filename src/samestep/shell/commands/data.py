"""`samestep data`: download a data set, or list those that can be downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, UseAppendAction, arg

from samestep.base.words import count, size, wrapped
from samestep.core.data.catalog import CATALOG
from samestep.core.data.download import download
from samestep.shell.commands.help import inner_verb, parse_flags

_EXAMPLES = ("data list", "data get mnist --data-dir data/mnist")
_VERBS = {
    "get": "download a data set into a folder",
    "list": "show the data sets with their size, licence and source",
}


@dataclass(frozen=True, kw_only=True)
class _Get:
    """Download a data set into a folder; files that are already correct are kept."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """Name of the data set; `samestep data list` shows them all."""
    data_dir: Annotated[Path, arg(metavar="DIR")]
    """Folder for the files; created if missing."""
    mirror: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="URL")] = ()
    """URL of a folder with the files, used instead of the known mirrors. Repeatable."""


@dataclass(frozen=True, kw_only=True)
class _List:
    """Show the data sets that can be downloaded."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    about = "Download a data set, verified by hash, or list the data sets."
    verb, flags = inner_verb("data", about, _VERBS, arguments, *_EXAMPLES)
    if verb == "get":
        command = parse_flags(_Get, "data get", flags, *_EXAMPLES)
        paths = download(command.name, command.data_dir, mirrors=command.mirror)
        files = count(len(paths), "file")
        print(f"{command.name} is in {command.data_dir}: {files}, checked.")  # noqa: T201
    else:
        parse_flags(_List, "data list", flags, *_EXAMPLES)
        width = Console().width
        for dataset in CATALOG.values():
            takes = size(sum(file.size_bytes for file in dataset.files))
            print(f"{dataset.name}  {count(len(dataset.files), 'file')}, {takes}")  # noqa: T201
            for text in (dataset.description, dataset.licence, dataset.source):
                print("\n".join(wrapped(f"  {text}", "  ", width)))  # noqa: T201
    return 0
