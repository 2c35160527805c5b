"""Memory of a process: freed memory kept for the next step, and the most that was used."""

import ctypes
import platform
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MOST_OF_MMAP = 32 << 20  # more than that glibc does not take
_NEVER = 2**31 - 1


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that this process has had: on a GPU its tensors, else all of it.

    None where the system does not tell, as on Windows.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # Linux counts in KiB


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
