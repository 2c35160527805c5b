"""What a test needs beyond this machine's Python: it is skipped where that is not installed."""

from importlib.util import find_spec

import pytest


def needs(module: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need a module, which is not imported while they are found."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")
