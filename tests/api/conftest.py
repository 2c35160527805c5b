"""Calls in pytest's own process read recipe files there; other tests find none of it."""

import sys

import pytest
import torch._dynamo  # noqa: F401 - it sets a variable of the environment, once


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch, tmp_path):
    """Forget the modules of recipe files, and the folders that they were found in."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
