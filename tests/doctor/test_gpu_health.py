"""A GPU's measured speed beside its data sheet, and what nvidia-smi says of its state."""

from dataclasses import replace

import pytest
import torch

from samestep.doctor import gpu_health as checks
from samestep.doctor.findings import run_checks, worst
from samestep.doctor.rank_facts import GpuHealth
from samestep.ranks.peak_rates import link_gb_s, peak_flops_per_s
from tests.doctor.situations import rank, says

SPEEDS = {"bf16_tflop_s": 690.0, "peak_tflop_s": 989.4, "to_gpu_gb_s": 54.0, "from_gpu_gb_s": 52.0}
HEALTHY = GpuHealth(**SPEEDS, link_gb_s=63.0, clock_mhz=1980, most_mhz=1980, uncorrected=0)
FAULTS = {
    checks.gpu_speed: [({"bf16_tflop_s": 310.0}, "yellow: 31% | nvidia-smi")],
    checks.gpu_copies: [
        ({"from_gpu_gb_s": 12.0}, "yellow: 12.0 GB/s | carries 63"),
        ({"link_gb_s": None, "to_gpu_gb_s": 3.0}, "yellow: 3.0 GB/s"),
    ],
    checks.gpu_clocks: [({"clock_mhz": 900, "slowed_by": ("power brake",)}, "yellow: 900 | brake")],
    checks.gpu_memory: [({"uncorrected": 2}, "red: 2 errors | --exclude")],
    checks.gpu_processes: [({"others": (41, 42)}, "yellow: 2 other | PID 41, 42")],
}
# What nvidia-smi of this shape prints; the other GPU is another job's.
NVIDIA_SMI = """#!/bin/sh
case "$1" in
*compute-apps*) printf 'GPU-aa, 11\\nGPU-aa, 1\\nGPU-bb, 12\\n' ;;
*clocks_event_reasons*) echo "Field is not valid" >&2; exit 2 ;;
*) printf 'GPU-bb, 210, 1980, 7, 5, 16, 0x1\\nGPU-aa, 1200, 1980, [N/A], 5, 16, 0x44\\n' ;;
esac
"""


def test_a_healthy_gpu_is_all_green_and_a_cpu_has_no_such_row():
    found = run_checks(checks.CHECKS, replace(rank(), gpu=HEALTHY))
    assert (len(found), worst(found)) == (4, "green")
    unknown = replace(HEALTHY, peak_tflop_s=None, clock_mhz=None, uncorrected=None)
    assert worst(run_checks(checks.CHECKS, replace(rank(), gpu=unknown))) == "green"
    assert run_checks(checks.CHECKS, rank()) == []


@pytest.mark.parametrize("check", FAULTS)
def test_each_planted_fault_is_found_and_comes_with_advice(check):
    for changes, said in FAULTS[check]:
        says(check(replace(rank(), gpu=replace(HEALTHY, **changes))), said)


def test_what_an_older_nvidia_smi_says_of_this_gpu_is_read(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(checks, "_measure", lambda _: (5e14, 50.0, 49.0))
    found = checks.read_gpu(torch.device("cuda", 0), "aa", "NVIDIA H100 PCIe")
    speeds = {"bf16_tflop_s": 500.0, "peak_tflop_s": 756.0, "to_gpu_gb_s": 50.0}
    speeds |= {"from_gpu_gb_s": 49.0, "link_gb_s": pytest.approx(63.0, rel=0.01)}
    clocks = {"clock_mhz": 1200, "most_mhz": 1980, "slowed_by": ("heat (hardware)",)}
    assert found == GpuHealth(**speeds, **clocks, others=(11, 1))
    monkeypatch.setenv("PATH", "")
    unknown = checks.read_gpu(torch.device("cuda", 0), "aa", "a new GPU")
    assert (unknown.clock_mhz, unknown.link_gb_s, unknown.others) == (None, None, ())
    assert unknown.peak_tflop_s is None


def test_rates_of_data_sheets_are_dense_and_by_the_exact_name():
    assert peak_flops_per_s("NVIDIA H200", "bf16", tf32=False) == 989.4e12
    assert peak_flops_per_s("NVIDIA H200", "fp32", tf32=True) == 494.7e12
    assert peak_flops_per_s("NVIDIA A10G", "bf16", tf32=False) is None, "not an A10"
    assert link_gb_s(4, 16) == pytest.approx(31.5, rel=0.01)
    assert link_gb_s(9, 16) is None
