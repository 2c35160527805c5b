"""A Slurm of two nodes for the tests of this folder: one for all, up in about a second."""

import os

import pytest

from samestep.cluster.slurm.sandbox_cluster import down, up
from tests.cluster.sandbox import RunningSandbox, reason_to_skip


def pytest_itemcollected(item):
    """Mark this folder's tests, which need a real Slurm, and keep those of a sandbox together."""
    item.add_marker(pytest.mark.cluster)
    groups = {"test_survival": "long jobs", "test_two_hosts": "hosts", "test_elastic": "hosts"}
    item.add_marker(pytest.mark.xdist_group(groups.get(item.path.stem, "cluster")))


@pytest.fixture(scope="session")
def sandbox(tmp_path_factory):
    """Give a sandbox of two nodes of four CPUs; whoever kills a node starts it again."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("sandbox").resolve()
    try:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
        now = up(folder, nodes=2, cpus=4, first_job=1000 * (1 + int(worker)))
        yield RunningSandbox(folder=folder, nodes=tuple(now.nodes))
    finally:
        down(folder)


@pytest.fixture
def empty(tmp_path_factory):
    """Give a folder for a sandbox of the test's own; what is up in it is taken down."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    # A test's own folder has a name too long for a socket in it.
    folder = tmp_path_factory.mktemp("own").resolve() / "it"
    yield folder
    down(folder)
