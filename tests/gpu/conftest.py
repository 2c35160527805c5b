"""Tests of what only a GPU does: skipped where there is none, and tried on the CPU by --dry.

`bash tools/gpu.sh check` runs them on a machine with a GPU. With --dry (SAMESTEP_GPU_DRY) the tests
marked `gpu(dry=True)` run on the CPU instead, so that their own code is known to run.
"""

import os
from pathlib import Path

import pytest
import torch

from samestep import Settings
from samestep.core.learner.device import switched
from tests.cifar_files import write_binary, write_folders
from tests.idx_files import write_mnist

DRY = bool(os.environ.get("SAMESTEP_GPU_DRY"))
NO_GPU = "no CUDA device here: `bash tools/gpu.sh check` runs it on a machine with one"
NOT_DRY = "it says something only of a GPU; not run dry"

HAS_CUDA = torch.cuda.is_available()
if HAS_CUDA:
    # Asked in the usual way, CUDA is started by the question; ranks that are forked from the fork
    # server, which imports what may ask it, could then not use the GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def pytest_collection_modifyitems(items):
    for item in items:
        marks = list(item.iter_markers("gpu"))
        if not marks:
            continue
        if DRY and not any(mark.kwargs.get("dry") for mark in marks):
            item.add_marker(pytest.mark.skip(reason=NOT_DRY))
        elif not DRY and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """Return the first GPU; run dry, the CPU in its place."""
    return torch.device("cpu") if DRY else torch.device("cuda", 0)


@pytest.fixture
def ieee():
    """Compute float32 products in float32, without TF32, for one test."""
    with switched(Settings(matmul_precision="highest"), torch.device("cuda")):
        yield


def _real(name: str) -> Path | None:
    folder = os.environ.get("SAMESTEP_GPU_DATA")
    return Path(folder) / name if folder and (Path(folder) / name).is_dir() else None


@pytest.fixture(scope="session")
def cifar10(tmp_path_factory) -> Path:
    """Return the folder of CIFAR-10: the kit's, else made files."""
    return _real("cifar10") or write_binary(tmp_path_factory.mktemp("cifar10"))


@pytest.fixture(scope="session")
def mnist(tmp_path_factory) -> Path:
    """Return the folder of MNIST's files: the kit's, else made files."""
    return _real("mnist") or write_mnist(tmp_path_factory.mktemp("mnist"))


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """Return a folder of images, train/CLASS/*.jpg: the kit's, else made ones."""
    return _real("images") or write_folders(tmp_path_factory.mktemp("images"))
