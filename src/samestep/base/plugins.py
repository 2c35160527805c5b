"""What is installed: this version, and recipes, trackers and verbs of packages, by entry points.

    [project.entry-points."samestep.recipes"]
    resnet50 = "my_package.resnet50"        # a module with `recipe`

A package cannot replace what comes with samestep. Entry points are read where a name is none of
samestep's own, or all names are listed, since that takes tens of milliseconds.
"""

import importlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from samestep.base.errors import UserError, error_text

__version__ = "0.1.0"
"""Of this package; the build reads it here."""


class Names(Mapping[str, str]):
    """Names of one kind → where each is: samestep's own, then those of installed packages."""

    def __init__(self, own: Mapping[str, str], group: str) -> None:
        self._own, self.group = own, group

    @cached_property
    def installed(self) -> dict[str, str]:
        """What packages bring under other names than samestep's own: `module` or `module:name`."""
        from importlib.metadata import entry_points  # noqa: PLC0415 - it takes a while

        modules = {e.name: e.value for e in entry_points(group=f"samestep.{self.group}")}
        return {name: modules[name] for name in sorted(modules) if name not in self._own}

    def __getitem__(self, name: str) -> str:
        if name in self._own:
            return self._own[name]
        if "." in name or "/" in name:  # a file, or a module
            raise KeyError(name)
        return self.installed[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self.installed

    def __len__(self) -> int:
        return len(self._own) + len(self.installed)

    def load(self, name: str) -> Any:
        """Return the module, or the object in it, that a name stands for.

        Raises:
            UserError: its package fails as it is imported.
        """
        module, _, attribute = self[name].partition(":")
        try:
            loaded: Any = importlib.import_module(module)
            return getattr(loaded, attribute) if attribute else loaded
        except Exception as error:
            if name in self._own:
                raise
            raise UserError(
                f"{name} of samestep.{self.group} comes from {module}, which cannot be imported: "
                f"{error_text(error)}. Repair or uninstall the package that provides it."
            ) from error
