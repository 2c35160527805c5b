"""Replace functions of other packages for a while, each by one that knows the original."""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Patch = tuple[Any, str, Callable[..., Any]]
"""A place, the name of a function there, and what is called instead: `around(original, *args)`."""


@contextlib.contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """Call `around(original, *args, **kwargs)` in place of each function while inside."""
    with contextlib.ExitStack() as stack:
        for place, name, around in patches:
            # A static method would be bound to its instance if it came back as a plain function.
            original = vars(place).get(name) if isinstance(place, type) else None
            function = getattr(place, name)
            replacement = _replacement(function, around)
            static = isinstance(original, staticmethod)
            setattr(place, name, staticmethod(replacement) if static else replacement)
            stack.callback(_restore, place, name, original, function)
        yield


def _restore(place: Any, name: str, original: Any, function: Any) -> None:
    if isinstance(place, type) and original is None:  # it was inherited
        delattr(place, name)
    else:
        setattr(place, name, function if original is None else original)


def _replacement(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return replacement


@contextlib.contextmanager
def patched_when_imported(
    wanted: Mapping[str, Callable[[ModuleType], list[Patch]]],
) -> Iterator[None]:
    """Patch modules as soon as they are imported while inside; those that already are, at once."""
    with contextlib.ExitStack() as stack:
        finder = _Finder(dict(wanted), lambda patches: stack.enter_context(patched(*patches)))
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


class _Finder:
    def __init__(
        self,
        wanted: dict[str, Callable[[ModuleType], list[Patch]]],
        patch: Callable[[list[Patch]], object],
    ) -> None:
        self._wanted, self._patch = wanted, patch
        for name in [name for name in wanted if name in sys.modules]:
            patch(wanted.pop(name)(sys.modules[name]))

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return a module's own spec, whose loader also patches it."""
        patches = self._wanted.pop(name, None)  # the finders are asked again, then for the real one
        spec = importlib.util.find_spec(name) if patches is not None else None
        if patches is None or spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            self._patch(patches(module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
