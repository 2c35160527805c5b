"""Print what this machine has, as JSON: Python, torch, devices, packages. It needs no package.

On the machine with the GPU: `python3 tools/gpu_probe.py > probe.json`. Where the kit is made:
`make gpu-kit PROBE=probe.json`.
"""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import distributions
from typing import Any

_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def probe() -> dict[str, Any]:
    """Return what this machine has."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "driver": _driver(),
        **_torch(),
        "packages": {d.name: d.version for d in distributions() if d.name},
    }


def _driver() -> str | None:
    if shutil.which(_DRIVER[0]) is None:
        return None
    done = subprocess.run(_DRIVER, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split("\n")[0].strip() or None


def _torch() -> dict[str, Any]:
    try:
        import torch  # noqa: PLC0415 - it may be missing, and this says so
    except ImportError as error:
        return {"torch": None, "why_no_torch": str(error), "devices": []}
    cuda = torch.cuda.is_available()
    nccl = torch.cuda.nccl.version() if cuda else None  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn(torch) if cuda else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "devices": [_device(torch.cuda.get_device_properties(n)) for n in range(_count(torch))],
    }


def _cudnn(torch: Any) -> int:
    return int(torch.backends.cudnn.version())


def _count(torch: Any) -> int:
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _device(found: Any) -> dict[str, Any]:
    return {
        "name": found.name,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
    }


if __name__ == "__main__":
    print(json.dumps(probe(), indent=1))
