"""A call in somebody's process: it computes as a fresh process would, and leaves all as it was."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from samestep.training.alike import random_numbers
from samestep.training.device import outside_autocast


@contextmanager
def as_before() -> Iterator[None]:
    """Compute with PyTorch's usual modes; afterwards modes, random numbers, threads are as before.

    Gradients that are turned off, autocast, or another default type or device around the call would
    otherwise make another training of it.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        with ExitStack() as stack:
            stack.enter_context(random_numbers(0))
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(outside_autocast())
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
