"""On a GPU: TF32, cuDNN and deterministic kernels, bfloat16 weights, seeds, copies, and NCCL."""

import subprocess

import pytest
import torch
from torch import nn

from samestep import Settings
from samestep.base.run.checkpoints import on_host
from samestep.core.data.keyed_random import seed_torch
from samestep.core.data.source import Batch
from samestep.core.learner.device import kernels_of, switched
from samestep.core.learner.optimizer import make_optimizer
from samestep.core.learner.optimizer_state import load_state
from samestep.core.learner.prepare import wrap
from samestep.core.training.evaluation import Totals
from samestep.launch.ranks.world import GROUP_OF_ONE, find_world, gpu_uuid, join, leave
from tests import tiny
from tests.command_line import read_json, refusal, run
from tests.gpu.trainings import no_synchronisation
from tests.processes import run_ranks

pytestmark = pytest.mark.gpu

IMAGES = """
import torch
from torch import nn
from samestep import Recipe, Splits
def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(300, 3, 16, 16, generator=generator)
    y = (x[:, 0].mean((1, 2)) > 0).long()
    return Splits(train=(x[:200], y[:200]), validation=(x[200:], y[200:]))
class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), POOL, nn.Flatten(), nn.Dropout(0.2),
            nn.LazyLinear(2),
        )
        self.layers(torch.zeros(2, 3, 16, 16))
    def forward(self, x):
        EXTRA
        return self.layers(x)
recipe = Recipe(model=Network, data=data, settings={
    "epochs": 4, "batch_size": 20, "lr": 0.01, "log_every": 1})
"""
PLAIN = {"POOL": "nn.AvgPool2d(7)", "EXTRA": ""}


@pytest.fixture
def recipe(tmp_path):
    def write(**changed):
        text = IMAGES
        for word, value in {**PLAIN, **changed}.items():
            text = text.replace(word, value)
        return tiny.write_recipe(tmp_path, text, "images_recipe.py")

    return write


def train(device, target, folder, name, *flags, environment=None):
    path = folder / name
    arguments = map(str, ("train", target, "--run-dir", path, "--device", device.type, *flags))
    run(*arguments, folder=folder / "output", environment=environment)
    return path


@pytest.mark.gpu(dry=True)
def test_deterministic_trainings_are_equal_to_the_last_bit(cuda, recipe, tmp_path):
    target, flag = recipe(), "--deterministic"
    whole, again = (train(cuda, target, tmp_path, name, flag) for name in ("whole", "again"))
    tiny.assert_same_training(again, whole, 0.0)
    short = train(cuda, target, tmp_path, "short", flag, "--epochs", 2)
    run("train", str(short), "--resume", "--epochs", "4", folder=tmp_path / "output")
    tiny.assert_same_training(short, whole, 0.0)
    if cuda.type == "cuda":
        assert read_json(whole / "environment.json")["kernels"]["deterministic"]


def test_an_operation_without_a_deterministic_form_is_refused_in_words(cuda, recipe, tmp_path):
    target = recipe(POOL="nn.AdaptiveMaxPool2d(2)")
    flags = ("--run-dir", str(tmp_path / "run"), "--device", "cuda", "--deterministic")
    message = refusal("train", str(target), *flags, folder=tmp_path / "output")
    assert "--deterministic: " in message
    assert "adaptive_max_pool2d" in message


def error_of(function, *tensors):
    """Return how far a float32 result is from that of float64, relative to its size."""
    exact = function(*(t.double() for t in tensors))
    return float((function(*tensors).double() - exact).norm() / exact.norm())


def test_the_precision_of_products_and_convolutions_is_the_one_asked_for(cuda):
    generator = torch.Generator(cuda).manual_seed(0)
    a, b = (torch.randn(512, 512, device=cuda, generator=generator) for _ in range(2))
    x = torch.randn(8, 64, 32, 32, device=cuda, generator=generator)
    w = torch.randn(64, 64, 3, 3, device=cuda, generator=generator)
    errors = {}
    for precision in ("highest", "high"):
        with switched(Settings(matmul_precision=precision), cuda):
            tf32 = precision == "high"
            kernels = kernels_of(cuda)["kernels"]
            assert kernels["tf32_products"] == kernels["tf32_convolutions"] == tf32
            errors[precision] = (error_of(torch.mm, a, b), error_of(nn.functional.conv2d, x, w))
    assert max(errors["highest"]) < 1e-5
    assert errors["high"][0] > 1e-5  # a GPU older than 2020 has no TF32


def test_a_run_says_which_kernels_it_computes_with(cuda, recipe, tmp_path):
    flags = ("--epochs", 1, "--matmul-precision", "high", "--cudnn-benchmark")
    path = train(cuda, recipe(), tmp_path, "run", *flags)
    kernels = read_json(path / "environment.json")["kernels"]
    assert kernels == {
        "tf32_products": True,
        "tf32_convolutions": True,
        "cudnn_benchmark": True,
        "deterministic": False,
    }
    (start,) = (r for r in tiny.all_records(path) if r["event"] == "start")
    assert start["kernels"] == kernels


@pytest.mark.parametrize("compiled", [pytest.param("off", marks=pytest.mark.gpu(dry=True)), "on"])
def test_weights_in_bfloat16_train(cuda, recipe, tmp_path, compiled):
    flags = ("--precision", "bf16", "--param-dtype", "bf16", "--compile", compiled)
    path = train(cuda, recipe(), tmp_path, "run", *flags)
    state = tiny.last_state(path)
    assert state["model"]["layers.0.weight"].dtype == torch.bfloat16
    assert state["optimizer"]["state"][0]["exp_avg"].dtype == torch.bfloat16
    assert state["model"]["layers.1.running_mean"].dtype == torch.float32
    losses = [r["loss"] for r in tiny.all_records(path) if r["event"] == "epoch"]
    assert losses[-1] < losses[0]


def test_an_evaluation_that_needs_too_much_memory_leaves_a_checkpoint(cuda, recipe, tmp_path):
    """Of 100 samples it wants 800 GiB; of the few that are tried before the training, less."""
    target = recipe(EXTRA="self.training or len(x) < 50 or x.new_empty(len(x), 2**31)")
    flags = ("--run-dir", str(tmp_path / "run"), "--device", "cuda", "--eval-batch-size", "100")
    message = refusal("train", str(target), *flags, folder=tmp_path / "output")
    assert "CUDA out of memory" in message
    assert "--eval-batch-size" in message
    assert tiny.newest_announced(tmp_path / "run") == 10


@pytest.mark.gpu(dry=True)
def test_a_step_seeds_its_device_as_torch_does(cuda):
    seed_torch(5, cuda)
    ours = torch.rand(4), torch.rand(4, device=cuda)
    torch.manual_seed(5)
    theirs = torch.rand(4), torch.rand(4, device=cuda)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_an_evaluation_does_not_make_the_host_wait_between_batches(cuda):
    world = find_world("cuda", environment={})
    totals = Totals(
        nn.functional.cross_entropy,
        {"accuracy": lambda outputs, targets: outputs.argmax(dim=1) == targets},
        world,
        ("a", "b", "c"),
    )
    outputs, targets = torch.randn(30, 3, device=cuda), torch.randint(3, (30,), device=cuda)
    batch = Batch(None, targets, 30)
    totals.add(outputs, batch)
    with no_synchronisation():
        totals.add(outputs, batch)
    means = totals.means()
    assert means["samples"] == 60
    assert sum(map(sum, means["confusion"])) == 60


def test_a_state_is_copied_to_pinned_memory_once(cuda):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(cuda)
    model.to(memory_format=torch.channels_last)
    state = model.state_dict()
    found = on_host({"model": state, "same": state["0.weight"]})
    for name, tensor in state.items():
        copy = found["model"][name]
        assert copy.device.type == "cpu"
        assert copy.is_pinned()
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor.cpu())
    assert found["same"] is found["model"]["0.weight"]


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_an_optimizers_state_moves_to_the_cpu_and_back(cuda, optimizer):
    """The step counts too: the fused kernel wants them on its device."""
    settings = Settings(optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    saved = None
    for device in (cuda, torch.device("cpu"), cuda):
        model = nn.Linear(3, 2).to(device)
        built = make_optimizer(model.parameters(), settings, 0.1, device)
        if saved is not None:
            load_state(built, saved)
        model(torch.ones(4, 3, device=device)).sum().backward()
        built.step()
        for state in built.state.values():
            assert {value.device.type for value in state.values()} == {device.type}
        saved = on_host(built.state_dict())
    if optimizer == "adam":
        assert float(saved["state"][0]["step"]) == 3


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_first_step_that_the_scaler_skips_leaves_no_momentum(cuda, momentum):
    settings = Settings(optimizer="sgd", momentum=momentum, precision="fp16")
    weight = nn.Parameter(torch.ones(1000, device=cuda))
    optimizer = make_optimizer([weight], settings, 0.1, cuda)
    scaler = torch.amp.GradScaler(cuda.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=cuda))
    for gradient in (torch.inf, 2.0):
        weight.grad = torch.full_like(weight, gradient)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.9))


@pytest.mark.gpu(dry=True)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_weights_in_bfloat16_move_as_those_in_float32(cuda, optimizer):
    settings = Settings(optimizer=optimizer, precision="bf16", param_dtype="bf16")
    moved = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(torch.ones(1000, dtype=dtype, device=cuda))
        built = make_optimizer([weight], settings, 0.25, cuda)
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            built.step()
        moved.append(weight.detach().float())
    torch.testing.assert_close(*moved, rtol=0.01, atol=0.01)


def on_nccl():
    """Do what ranks do together, as one rank."""
    world = find_world("cuda", environment={GROUP_OF_ONE: "1"})
    join(world, timeout_s=60)
    on_device = torch.arange(4.0, device=world.device)
    world.add_up(on_device)
    model = wrap(nn.Linear(4, 2).to(world.device), world, Settings())
    model(on_device).sum().backward()
    found = {
        "backend": world.backend,
        "wrapped": type(model).__name__,
        "gradient": next(model.parameters()).grad[0].tolist(),
        "on_device": world.reduce(on_device).tolist(),
        "on_host": world.reduce(torch.tensor([2.0]), "max").tolist(),
        "gathered": world.gather("a"),
    }
    world.barrier()
    del model
    leave(world)
    return found


def test_a_group_of_one_on_nccl_runs_all_that_connects_ranks(cuda, tmp_path):
    (found,) = run_ranks(on_nccl, 1, tmp_path)
    assert found == {
        "backend": "nccl",
        "wrapped": "DistributedDataParallel",
        "gradient": [0.0, 1.0, 2.0, 3.0],
        "on_device": [0.0, 1.0, 2.0, 3.0],
        "on_host": [2.0],
        "gathered": ["a"],
    }


def test_the_group_of_one_changes_nothing_of_a_deterministic_training(cuda, recipe, tmp_path):
    target, flags = recipe(), ("--deterministic", "--bucket-cap-mb", "1")
    plain = train(cuda, target, tmp_path, "plain", *flags)
    grouped = train(cuda, target, tmp_path, "grouped", *flags, environment={GROUP_OF_ONE: "1"})
    assert read_json(grouped / "environment.json")["backend"] == "nccl"
    # In a bucket of DDP a gradient need not begin at 16 bytes, and then the kernel that sums its
    # squares adds them in another order: the recorded norm may be rounded otherwise, nothing else.
    tiny.assert_same_training(grouped, plain, 1e-6)
    one, other = (
        ([r.get("loss") for r in tiny.account(run)], read_json(run / "result.json"))
        for run in (grouped, plain)
    )
    assert one[0] == other[0]
    assert one[1]["weights_sha256"] == other[1]["weights_sha256"]


def test_the_uuid_of_a_gpu_is_the_one_that_its_driver_has(cuda):
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    printed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    assert f"GPU-{gpu_uuid(cuda)}" in printed.split()
