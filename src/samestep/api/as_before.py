"""What a call in somebody's process leaves as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samestep.training.snapshot import random_numbers


@contextmanager
def as_before() -> Iterator[None]:
    """Leave this process's random numbers and threads as they were."""
    threads = torch.get_num_threads()
    try:
        with random_numbers(0):
            yield
    finally:
        torch.set_num_threads(threads)
