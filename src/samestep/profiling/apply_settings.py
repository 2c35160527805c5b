"""Write the settings that sweeps chose into a TOML file, and leave the rest of it as it was."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from samestep.errors import UserError
from samestep.profiling.tracing import write_whole
from samestep.settings import own_names


def check_place(config: Path | None, recipe: str) -> Path:
    """Return the file to write into: that of --config, or a new one named after the recipe.

    Raises:
        UserError: there is a file of that name already, or none that --config names.
    """
    path = config or Path(f"{recipe}.toml")
    if config is None and path.exists():
        raise UserError(
            f"{path} is there already: name it with --config to have it changed.", on_all_ranks=True
        )
    return path


def apply_settings(path: Path, values: Mapping[str, int], recipe: str) -> None:
    """Set some top-level keys of a TOML file; a new file also names its recipe.

    Comments, order and all other keys stay.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else f'recipe = "{recipe}"\n'
    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is no valid TOML: {error}. Nothing was changed.") from error
    written = {own: key for key in before for own in own_names({key.replace("-", "_"): 0}, path)}
    changes = {written.get(key, key): value for key, value in values.items()}
    table = re.search(r"\s*^[ \t]*\[", text, re.MULTILINE)
    end = table.start() if table else len(text.rstrip())
    top, tables = text[:end], text[end:]
    for key, value in changes.items():
        line = re.compile(rf"^([ \t]*{re.escape(key)}[ \t]*=[ \t]*)[^\s#]+", re.MULTILINE)
        top, count = line.subn(rf"\g<1>{value}", top)
        if not count:
            top += f"\n{key} = {value}"
    try:
        after = tomllib.loads(top + tables)
    except tomllib.TOMLDecodeError:
        after = {}
    if after != before | changes:  # such as a key in quotes, or a value over several lines
        wanted = ", ".join(f"{key} = {value}" for key, value in changes.items())
        raise UserError(f"{path} is written in a form that --apply cannot change. Set: {wanted}.")
    write_whole(path, (top + tables).encode())
