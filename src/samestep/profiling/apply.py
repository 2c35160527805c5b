"""Write the setting that a sweep chose into a TOML file, and leave the rest of it as it was."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from samestep.errors import UserError
from samestep.profiling.tracing import write_whole


def apply(path: Path, values: Mapping[str, int], recipe: str) -> None:
    """Set some keys of a TOML file of settings; a new file also names its recipe.

    Comments, order and all other keys stay.

    Raises:
        UserError: the file is no TOML, or could not be written.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f'recipe = "{recipe}"\n'
    for key, value in values.items():
        text = _set(text, key, value)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is no valid TOML: {error}. Nothing was changed.") from error
    found = {key.replace("-", "_"): value for key, value in table.items()}
    assert all(found[key] == value for key, value in values.items())
    write_whole(path, text.encode())


def _set(text: str, key: str, value: int) -> str:
    head, table, rest = text, "", ""
    first = re.search(r"^[ \t]*\[", text, re.MULTILINE)
    if first:
        head, table, rest = text[: first.start()], text[first.start() :], ""
    name = key.replace("_", "[_-]")
    line = re.compile(rf"^(\s*{name}\s*=\s*)[^#\n]*?(\s*(#.*)?)$", re.MULTILINE)
    if line.search(head):
        head = line.sub(rf"\g<1>{value}\g<2>", head, count=1)
    else:
        head = head.rstrip("\n") + ("\n" if head.strip() else "") + f"{key} = {value}\n"
        head += "\n" if table else ""
    return head + table + rest
