"""Write the settings that sweeps chose into a TOML file, and leave the rest of it as it was."""

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
    """Set some keys of a TOML file of settings; a new file also names its recipe.

    Comments, order and all other keys stay.

    Raises:
        UserError: the file is no TOML, or could not be written.
    """
    import tomlkit  # noqa: PLC0415 - only where a file is changed
    from tomlkit.exceptions import TOMLKitError  # noqa: PLC0415

    text = path.read_text(encoding="utf-8") if path.exists() else f'recipe = "{recipe}"\n'
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise UserError(f"{path} is no valid TOML: {error}. Nothing was changed.") from error
    named = {str(key): str(key).replace("-", "_") for key in document}
    written = {own: key for key in named for own in own_names({named[key]: 0}, path)}
    for key, value in values.items():
        document[written.get(key, key)] = value
    write_whole(path, tomlkit.dumps(document).encode())
