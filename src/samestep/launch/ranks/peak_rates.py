"""What devices can do at most, by their makers' data sheets: an unknown device has no entry."""

_TERA = 10**12
# Dense rates in 10¹² operations per second: of bf16 and fp16, of TF32, of fp32, and of fp64, the
# faster of the two units where a device has tensor cores for it. By the makers' data sheets: NVIDIA
# B200 (HGX), H200, H100, A100, A40, A10, L40S, L4, V100 and T4, and AMD Instinct MI300X. A data
# sheet's "with sparsity" is halved.
_RATES: dict[str, tuple[float, float, float, float]] = {
    "B200": (2250.0, 1125.0, 75.0, 37.0),
    "H200": (989.4, 494.7, 66.9, 66.9),
    "H100 80GB HBM3": (989.4, 494.7, 66.9, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0, 51.0),
    "H100 NVL": (835.0, 417.5, 60.0, 60.0),
    "GH200 480GB": (989.4, 494.7, 66.9, 66.9),
    "A100-SXM4-80GB": (312.0, 156.0, 19.5, 19.5),
    "A100-SXM4-40GB": (312.0, 156.0, 19.5, 19.5),
    "A100 80GB PCIe": (312.0, 156.0, 19.5, 19.5),
    "A100-PCIE-40GB": (312.0, 156.0, 19.5, 19.5),
    "A40": (149.7, 74.8, 37.4, 0.58),
    "A10": (125.0, 62.5, 31.2, 0.49),
    "L40S": (362.0, 183.0, 91.6, 1.4),
    "L4": (121.0, 60.0, 30.3, 0.47),
    "V100-SXM2-16GB": (125.0, 15.7, 15.7, 7.8),
    "V100-SXM2-32GB": (125.0, 15.7, 15.7, 7.8),
    "T4": (65.0, 8.1, 8.1, 0.25),
    "Instinct MI300X": (1307.4, 653.7, 163.4, 163.4),
}
_MAKERS = ("NVIDIA ", "Tesla ", "AMD ")
_GB_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of PCI Express by its generation, in each direction, after encoding (PCI-SIG)."""


def peak_flops_per_s(device_name: str, precision: str, *, tf32: bool) -> float | None:
    """Return what a device can do at most per second, by the name that PyTorch gives it, or None.

    `tf32`: whether float32 products are computed in TF32.
    """
    for maker in _MAKERS:
        device_name = device_name.removeprefix(maker)
    rates = _RATES.get(device_name)
    if rates is None:
        return None
    place = {"bf16": 0, "fp16": 0, "fp32": 1 if tf32 else 2, "fp64": 3}[precision]
    return rates[place] * _TERA


def link_gb_s(generation: int, lanes: int) -> float | None:
    """Return what a PCI Express link carries at most per second and direction, in 10⁹ bytes."""
    each = _GB_S_PER_LANE.get(generation)
    return None if each is None else each * lanes
