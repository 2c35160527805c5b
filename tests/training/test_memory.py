"""What a step frees serves the next one, and the system has no new pages to hand out."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from samestep.training.memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory(torch.device("cpu"))

def step():
    tensors = [torch.ones(4 << 20) for _ in range(4)]  # 16 MiB each

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_OF_A_STEP = 4 * (16 << 20) // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_a_step_asks_the_system_for_no_page_that_the_last_one_had():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "kept"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < PAGES_OF_A_STEP / 10  # without it: as many as a whole step has
