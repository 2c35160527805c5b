"""What a step frees serves the next one, and the system has no new pages to hand out."""

import platform

import pytest

from tests.command_line import typed

PROGRAM = """
import resource, statistics, torch
from samestep.training.device import choose_allocation

def step():
    tensors = [torch.ones(4 << 20) for _ in range(4)]  # 16 MiB each

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

left = statistics.median([pages() for _ in range(11)])
choose_allocation(torch.device("cpu"), sharded=False)
print(left, statistics.median([pages() for _ in range(11)]))
"""
PAGES_OF_A_STEP = 4 * (16 << 20) // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_a_step_asks_the_system_for_no_page_that_the_last_one_had():
    # glibc as it starts: it raises its thresholds by itself, and how far goes by the heap's luck.
    glibc = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = typed("-c", PROGRAM, **glibc)
    assert done.returncode == 0, done.stderr
    left, kept = map(float, done.stdout.split())
    assert left > PAGES_OF_A_STEP * 0.9
    assert kept < PAGES_OF_A_STEP / 100
