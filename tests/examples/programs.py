"""Start the examples as their reader does, and read what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TRAIN_DISTRIBUTED = str(ROOT / "examples" / "mnist_torchrun" / "train_distributed.py")
MNIST_PROFILING = ROOT / "examples" / "mnist_profiling"
SPIRAL_LIGHTNING = str(ROOT / "examples" / "spiral_lightning" / "train.py")
JOB_SCRIPTS = sorted([*ROOT.glob("examples/*/*.slurm"), *ROOT.glob("examples/*/*.sbatch")])

EPOCH = re.compile(
    r"^Epoch (\d+) - Avg Loss: (\d+\.\d+), Accuracy: (\d+\.\d\d)%\n"
    r"  held out - Avg Loss: (\d+\.\d+), Accuracy: (\d+\.\d\d)%$",
    re.MULTILINE,
)


def python(world_size: int = 1) -> list[str]:
    """Return what runs a script on this many ranks, the script's name to follow."""
    if world_size == 1:
        return [sys.executable]
    return [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world_size}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"),
    ]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user who sets the number of threads, lest torchrun warns."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def run(
    *command: str, folder: Path, world_size: int = 1, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, to whatever end."""
    return subprocess.run(
        [*python(world_size), *command],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def epochs(printed: str) -> list[tuple[float, ...]]:
    """Return each epoch's number, loss and accuracy, and those of the held-out images."""
    return [tuple(float(number) for number in found) for found in EPOCH.findall(printed)]
