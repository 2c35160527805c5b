"""Slurm's programs, played by scripts, for the tests of this folder."""

import pytest

from tests.slurm.fake_slurm import FakeSlurm, install


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    """Put a Slurm on the PATH that knows the jobs which a test adds."""
    fake = install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:/usr/bin:/bin")
    return fake
