"""Replace functions of other packages for a while, each by one that knows the original."""

import contextlib
import functools
from collections.abc import Callable, Iterator
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
            if isinstance(original, staticmethod):
                setattr(place, name, staticmethod(replacement))
            else:
                setattr(place, name, replacement)
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
