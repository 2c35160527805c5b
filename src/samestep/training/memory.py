"""Keep freed memory for the next step, where the C library would give it back to the system."""

import ctypes
import platform

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MOST_OF_MMAP = 32 << 20  # more than that glibc does not take
_NEVER = 2**31 - 1


def keep_freed_memory(device: torch.device) -> None:
    """Let glibc serve tensors of up to 32 MiB from memory that it has, on the CPU.

    A step frees its activations and the next asks for as many again. Left alone, glibc gives them
    back meanwhile, and the system hands out every page anew: a tenth of the time of a ResNet-18's
    step (docs/log.md). The price is that the process stays as large as it ever was.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MOST_OF_MMAP)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
