"""One GPU: what it does, next to what its data sheet says, and what nvidia-smi knows.

Everything is only read; no clock, mode or counter is changed.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from samestep.base.machine import link_gb_s, nvidia_smi, peak_flops_per_s
from samestep.cluster.doctor.findings import Check, Finding, graded, green, red, yellow
from samestep.cluster.doctor.rank_facts import GpuHealth

_MEASURED_S = 0.3
_SIDE, _COPY_BYTES = 8192, 256 << 20
_POOR = 0.5
"""Of what the data sheet says: less is yellow. Large products reach some 0.7 of it, copies 0.85."""
_SLOW_COPY_GB_S = 5.0  # less is yellow where the link is not known
_STATE = ("clocks.sm", "clocks.max.sm", "ecc.errors.uncorrected.volatile.total")
_LINK = ("pcie.link.gen.max", "pcie.link.width.max")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Their new name and that of drivers before 535."""
_SLOWED = {
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""Bits of these reasons that say something is wrong (NVML, nvmlClocksEventReasons)."""


def read_gpu(device: torch.device, uuid: str, name: str) -> GpuHealth:
    """Measure a GPU for about a second, and ask nvidia-smi about it."""
    rows = nvidia_smi("compute-apps", "gpu_uuid", "pid")  # before this process is one of them
    pids = [int(pid) for gpu, pid in rows if gpu.removeprefix("GPU-") == uuid]
    rate, to_gpu, from_gpu = _measure(device)
    state = _state_of(uuid)
    peak = peak_flops_per_s(name, "bf16", tf32=False)
    lanes = [_number(state.get(field)) for field in _LINK]
    reasons = next((state[field] for field in _REASONS if field in state), "0")
    bits = int(reasons, 16) if reasons.startswith("0x") else 0
    return GpuHealth(
        bf16_tflop_s=rate / 1e12,
        peak_tflop_s=None if peak is None else peak / 1e12,
        to_gpu_gb_s=to_gpu,
        from_gpu_gb_s=from_gpu,
        link_gb_s=None if None in lanes else link_gb_s(*map(int, filter(None, lanes))),
        clock_mhz=_number(state.get("clocks.sm")),
        most_mhz=_number(state.get("clocks.max.sm")),
        uncorrected=_number(state.get("ecc.errors.uncorrected.volatile.total")),
        slowed_by=tuple(reason for bit, reason in _SLOWED.items() if bits & bit),
        others=tuple(pid for pid in pids if pid != os.getpid() and not _is_doctor(pid)),
    )


def _measure(device: torch.device) -> tuple[float, float, float]:
    """Return the bf16 rate in operations per second, and the copies in GB/s: to it, from it."""
    matrix = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=device)
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    product = _seconds(device, lambda: torch.mm(matrix, matrix))
    to_gpu = _seconds(device, lambda: there.copy_(host, non_blocking=True))
    from_gpu = _seconds(device, lambda: host.copy_(there, non_blocking=True))
    copied = _COPY_BYTES / 1e9
    return 2 * _SIDE**3 / product, copied / to_gpu, copied / from_gpu


def _seconds(device: torch.device, function: Callable[[], object]) -> float:
    """Return the least seconds of a call, of those that fit the time."""
    function()
    times: list[float] = []
    while len(times) < 3 or sum(times) < _MEASURED_S:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        function()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def _state_of(uuid: str) -> dict[str, str]:
    """Return nvidia-smi's values for a GPU, by field; empty if it does not answer."""
    for reasons in _REASONS:
        fields = (*_STATE, *_LINK, reasons)
        for row in nvidia_smi("gpu", "uuid", *fields):
            if row[0].removeprefix("GPU-") == uuid:
                return dict(zip(fields, row[1:], strict=True))
    return {}


def _is_doctor(pid: int) -> bool:
    """Whether a process may be another rank of this examination."""
    with contextlib.suppress(OSError):
        return b"doctor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _number(text: str | None) -> int | None:
    """Return a number; None for what a GPU does not have, such as `[N/A]`."""
    return int(text) if text is not None and text.isdecimal() else None


def gpu_speed(gpu: GpuHealth) -> Finding:
    """Check that a large product of bf16 matrices is about as fast as it should be."""
    found = f"{gpu.bf16_tflop_s:.0f} TFLOP/s in bf16"
    if gpu.peak_tflop_s is None:
        return green(f"{found}; the peak of this GPU is not known")
    part = gpu.bf16_tflop_s / gpu.peak_tflop_s
    return graded(
        f"{found}, {part:.0%} of the {gpu.peak_tflop_s:.0f} of its data sheet",
        "Check what else runs on it, and its cooling: nvidia-smi -q -d PERFORMANCE,POWER.",
        yellow_if=part < _POOR,
    )


def gpu_copies(gpu: GpuHealth) -> Finding:
    """Check that batches reach the GPU as fast as its link carries them."""
    slowest = min(gpu.to_gpu_gb_s, gpu.from_gpu_gb_s)
    found = f"{gpu.to_gpu_gb_s:.1f} GB/s to the GPU, {gpu.from_gpu_gb_s:.1f} GB/s back"
    least = _SLOW_COPY_GB_S
    if gpu.link_gb_s is not None:
        found, least = f"{found}; its link carries {gpu.link_gb_s:.0f}", _POOR * gpu.link_gb_s
    return graded(
        found,
        "Other ranks may be copying; otherwise the link has fewer lanes, or this process runs on "
        "the other socket's cores: see nvidia-smi topo -m.",
        yellow_if=slowest < least,
    )


def gpu_clocks(gpu: GpuHealth) -> Finding | None:
    """Check that nothing slows the GPU's clocks down."""
    if gpu.clock_mhz is None:
        return None
    found = f"{gpu.clock_mhz:,} of {gpu.most_mhz or gpu.clock_mhz:,} MHz"
    if gpu.slowed_by:
        advice = "Exclude the node, and ask the administrators to check its cooling and power."
        return yellow(f"{found}, slowed down by {' and '.join(gpu.slowed_by)}", advice)
    return green(found)


def gpu_memory(gpu: GpuHealth) -> Finding | None:
    """Check that the GPU's memory had no uncorrectable error."""
    if gpu.uncorrected is None:
        return None
    if gpu.uncorrected:
        advice = "Exclude the node (#SBATCH --exclude), and ask the administrators to replace it."
        return red(f"{gpu.uncorrected:,} uncorrectable memory errors", advice)
    return green("no uncorrectable memory errors")


def gpu_processes(gpu: GpuHealth) -> Finding | None:
    """Check that no other process computes on the GPU."""
    if not gpu.others:
        return None
    pids = ", ".join(map(str, gpu.others[:4]))
    return yellow(
        f"{len(gpu.others)} other on it: PID {pids}",
        "They slow down the training: end them, or use another GPU (CUDA_VISIBLE_DEVICES).",
    )


CHECKS: list[Check[GpuHealth]] = [gpu_speed, gpu_copies, gpu_clocks, gpu_memory, gpu_processes]
