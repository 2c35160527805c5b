"""Process-wide switches follow the settings, and are put back; a step's memory is used again."""

import os
import platform

import pytest
import torch

from samestep import Settings
from samestep.base.errors import UserError
from samestep.core.learner.device import kernels_of, switched
from tests.command_line import read_json, typed
from tests.tiny import assert_same_training, events, trained, write_recipe

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
cudnn = torch.backends.cudnn


def state():
    return {
        "products": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "convolutions": cudnn.conv.fp32_precision == "tf32",
        "benchmark": cudnn.benchmark,
        "cudnn": cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


PLAIN = state()


def during(device=CPU, **told):
    with switched(Settings(**told), device):
        found = state()
    assert state() == PLAIN
    return {name: value for name, value in found.items() if value != PLAIN[name]}


def test_the_switches_follow_the_settings_but_leave_the_users_alone(monkeypatch):
    assert during() == {}
    assert PLAIN["convolutions"]
    assert not PLAIN["tf32"]
    assert during(matmul_precision="highest") == {"convolutions": False}
    assert during(matmul_precision="high") == {"products": "high", "tf32": True}
    assert during(matmul_precision="medium")["products"] == "medium"
    assert during(cudnn_benchmark=True) == {"benchmark": True}
    switches = {"cudnn": True, "deterministic": True}
    assert during(deterministic=True) == switches
    assert during(CUDA, deterministic=True) == {**switches, "workspace": ":4096:8"}  # for cuBLAS
    assert kernels_of(CPU) == {}
    with switched(Settings(matmul_precision="high", cudnn_benchmark=True), CUDA):
        on = dict.fromkeys(("tf32_products", "tf32_convolutions", "cudnn_benchmark"), True)
        assert kernels_of(CUDA)["kernels"] == on | {"deterministic": False}
    place = torch.backends.cuda.matmul
    kept, place.fp32_precision = place.fp32_precision, "tf32"
    try:
        told = Settings(matmul_precision="high")
        with pytest.raises(UserError, match="--matmul-precision"), switched(told, CPU):
            pass
        assert kernels_of(CUDA)["kernels"]["tf32_products"]
    finally:
        place.fp32_precision = kept
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    before = state()
    with switched(Settings(deterministic=True), CUDA):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    with pytest.raises(KeyError), switched(Settings(deterministic=True), CUDA):
        raise KeyError
    assert state() == before, "all is put back, after a failure too"


def test_muon_in_single_precision_makes_no_more_of_a_rounding_than_it_is():
    draw = torch.Generator().manual_seed(0)
    gradient = torch.randn(64, 32, generator=draw)

    def update(gradient, **how):
        weight = torch.nn.Parameter(torch.zeros(64, 32))
        weight.grad, before = gradient.clone(), gradient.clone()
        with switched(Settings(**how), CPU):
            torch.optim.Muon([weight], lr=1.0).step()
        assert torch.equal(weight.grad, before)
        return weight.detach()

    noise, apart = 1e-5 * torch.randn(64, 32, generator=draw), {}
    for kind in ("bf16", "fp32"):
        one, other = (update(g, newton_schulz=kind) for g in (gradient, gradient + noise))
        apart[kind] = float((one - other).abs().max())
    assert (apart["fp32"] < 1e-4, apart["bf16"] > 1e-3) == (True, True), apart


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"param_dtype": "bf16"}, "--precision bf16"),
        ({"param_dtype": "bf16", "precision": "fp16"}, "--precision fp16"),
        ({"param_dtype": "fp32", "precision": "fp64"}, "float64"),
        ({"deterministic": True, "cudnn_benchmark": True}, "--cudnn-benchmark"),
        ({"bucket_cap_mb": 0}, "--bucket-cap-mb"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(told, says):
    with pytest.raises(UserError, match=says):
        Settings(**told)


FLAGS = ("--deterministic", "--matmul-precision", "high", "--bucket-cap-mb", "3")
FLAGS += ("--newton-schulz", "fp32")


def test_a_training_with_them_is_the_same_on_a_cpu_and_says_what_has_no_effect(tmp_path):
    recipe = write_recipe(tmp_path)
    for name, flags in (("plain", ()), ("run", FLAGS)):
        trained(recipe, tmp_path / name, "--device", "cpu", "--epochs", "2", *flags)
    assert_same_training(tmp_path / "run", tmp_path / "plain", tolerance=0)
    (start,) = events(tmp_path / "run", "start")
    for flag in ("--bucket-cap-mb", "--newton-schulz"):
        assert any(flag in note for note in start["notes"])
    assert "kernels" not in start
    assert read_json(tmp_path / "run" / "environment.json")["gpus"] == []


PROGRAM = """
import resource, statistics, torch
from samestep.core.learner.device import choose_allocation
def step(): tensors = [torch.ones(4 << 20) for _ in range(4)]  # 16 MiB each
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
