"""Calls in pytest's own process read recipe files there; other tests find none of it."""

import sys

import pytest
import torch._dynamo  # noqa: F401 - it sets a variable of the environment, once


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
