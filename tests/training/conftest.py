"""For the tests of training: runs of the tiny recipe that nothing has interrupted."""

from pathlib import Path

import pytest

from tests.tiny import train, write_recipe


def _whole_run(folder: Path, world_size: int) -> Path:
    path = folder / "run"
    recipe = write_recipe(folder)
    train(recipe, "--run-dir", str(path), world_size=world_size, folder=folder)
    return path


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Path:
    """The tiny recipe trained to its end on one rank; only to be looked at."""
    return _whole_run(tmp_path_factory.mktemp("uninterrupted"), 1)


@pytest.fixture(scope="session")
def uninterrupted_on_two(tmp_path_factory) -> Path:
    """The same on two ranks."""
    return _whole_run(tmp_path_factory.mktemp("uninterrupted-on-two"), 2)
