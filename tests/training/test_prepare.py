"""Layouts, recomputed activations, SyncBatchNorm, a group of one: ways to compute the same."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samestep
from samestep.base.errors import UserError
from samestep.base.settings import Settings
from samestep.bridges.lightning.engine import _Strategy
from samestep.core.learner.prepare import match_layouts, prepare, wrap
from samestep.core.recipes.resnet import resnet18
from samestep.launch.ranks import world as worlds
from samestep.launch.ranks.world import GROUP_OF_ONE, World, find_world, join, leave
from tests.command_line import RECIPE, run
from tests.processes import run_ranks
from tests.tiny import all_records, assert_same_training, trained, write_recipe

CPU = World()
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _one_thread():
    """Two threads that wait for each other are no faster on models of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    """A block with all that a second computation could get wrong: statistics and dropout."""

    checkpoint_activations = True

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.cumulative = nn.BatchNorm2d(3, momentum=None)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(self.cumulative(self.norm(self.conv(x)).relu())) + x


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))


def small_resnet():
    torch.manual_seed(0)
    return resnet18(2, stem="small", width=4)


def prepared(model, world=CPU, **settings):
    return prepare(model, Settings(**settings), world, torch.float32)


def steps(model, num=3):
    """Train a few steps; return losses, gradients and the state after them."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    losses = []
    for step in range(num):
        images = torch.randn(6, 3, 8, 8, generator=generator)
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 0, 1, 0, 1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [p.grad.clone() for p in model.parameters()]
    return losses, gradients, [value.clone() for value in model.state_dict().values()]


def synchronised():
    """In one process SyncBatchNorm computes as BatchNorm does, and counts its batches alike."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(blocks())


@pytest.mark.parametrize("build", [blocks, small_resnet, synchronised])
def test_activation_checkpoints_change_no_bit_of_loss_gradient_or_statistics(build):
    plain, again = build(), prepared(build(), checkpoint_activations=True)
    for one, other in zip(steps(plain), steps(again), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(plain.eval()(images), again.eval()(images))


def test_activation_checkpoints_compute_marked_blocks_again_in_the_backward_alone():
    model, calls = prepared(blocks(), checkpoint_activations=True), []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    loss = model(torch.randn(4, 3, 8, 8)).sum()
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 4
    with torch.no_grad():
        model(torch.randn(4, 3, 8, 8))
    assert len(calls) == 6


def test_channels_last_lays_out_weights_and_maps_and_trains_the_same_but_for_rounding():
    plain, last = small_resnet(), prepared(small_resnet(), channels_last=True)
    maps = []
    last.layer1.register_forward_hook(lambda _m, _i, out: maps.append(out))
    last(torch.randn(2, 3, 8, 8))
    assert maps[0].is_contiguous(memory_format=LAST)
    assert not maps[0].is_contiguous()
    last = prepared(small_resnet(), channels_last=True)
    ours, theirs = steps(last)[0], steps(plain)[0]
    assert torch.stack(ours) == pytest.approx(torch.stack(theirs), rel=1e-4)


@pytest.mark.parametrize("saved_last", [True, False])
def test_optimizer_state_of_another_layout_is_applied_to_the_right_weights(saved_last):
    """A fused kernel goes through memory in order, so equal shapes are not enough."""

    def build(last):
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 5, 3)
        conv = conv.to(memory_format=LAST) if last else conv
        return conv, torch.optim.SGD(conv.parameters(), lr=0.1, momentum=0.9, fused=True)

    def step(conv, optimizer, seed):
        images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        conv(images).square().sum().backward()
        optimizer.step()

    one, its = build(saved_last)
    step(one, its, 1)
    other, own = build(not saved_last)
    other.load_state_dict(one.state_dict())
    own.load_state_dict(its.state_dict())
    match_layouts(own)
    step(one, its, 2)
    step(other, own, 2)
    assert float((one.weight - other.weight).detach().abs().max()) < 1e-5
    for value in own.state[other.weight].values():
        assert value.stride() == other.weight.stride()


@pytest.mark.parametrize(
    ("build", "ranks", "told", "named"),
    [
        (lambda: nn.Linear(2, 2), 1, {"checkpoint_activations": True}, "--checkpoint-activations"),
        (blocks, 1, {"checkpoint_activations": True, "compile": "on"}, "--compile on"),
        (blocks, 2, {"sync_batchnorm": True}, r"2 ranks .* cpu"),
        (lambda: nn.SyncBatchNorm(2), 2, {}, r"2 ranks .* cpu"),
        (lambda: nn.Linear(2, 2), 1, {"sync_batchnorm": True}, "--sync-batchnorm"),
    ],
)
def test_what_a_model_or_device_has_not_is_refused(build, ranks, told, named):
    with pytest.raises(UserError, match=named):
        prepared(build(), World(world_size=ranks), **told)


def test_sync_batchnorm_keeps_the_names_of_weights_and_on_one_rank_is_batchnorm():
    """There is no GPU here: this is what is converted, not what it computes."""
    from samestep.core.learner import prepare as module

    world = World(world_size=2, device=torch.device("cuda", 0))
    model = module._synchronise(blocks(), world, convert=True)
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) == 4
    assert model.state_dict().keys() == blocks().state_dict().keys()
    model = prepared(blocks(), sync_batchnorm=True)
    assert not any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())


HALF = {"precision": "bf16", "param_dtype": "bf16"}


def test_weights_are_held_in_bfloat16_recurrent_too_and_batch_normalisation_is_not():
    model = prepared(small_resnet(), **HALF)
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        norm = isinstance(module, nn.BatchNorm2d)
        kind = torch.float32 if norm else torch.bfloat16
        assert {t.dtype for t in own if t.is_floating_point()} <= {kind}
    assert prepared(small_resnet(), precision="bf16").fc.weight.dtype == torch.float32
    model = prepared(nn.LSTM(3, 4), **HALF)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.ones(2, 1, 3, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def resumed_on_this_rank():
    """Return the weights after four steps, and after two and two more of another start."""
    world = find_world("cpu")
    join(world, timeout_s=60)

    def train(settings, steps, weights=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 1))
        model.load_state_dict(weights or model.state_dict())
        wrapped = wrap(model, world, settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in steps:
            drawn = torch.Generator().manual_seed(10 * step + world.rank)
            optimizer.zero_grad()
            wrapped(torch.randn(8, 3, generator=drawn)).square().mean().backward()
            optimizer.step()
        del wrapped  # before the group ends
        return model.state_dict()

    found = []
    for how in ({}, {"static_graph": True}, {"find_unused": True}):
        s = Settings(**how)
        found.append((train(s, range(4)), train(s, (2, 3), train(s, (0, 1)))))
    leave(world)
    return found


def test_on_three_ranks_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path):
    """The sum of three rounds by where a gradient lies, which is the same from the first step."""
    for whole, resumed in run_ranks(resumed_on_this_rank, 3, tmp_path)[0]:
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setenv(GROUP_OF_ONE, "1")
    world = find_world("cpu", environment={GROUP_OF_ONE: "1"})
    join(world)
    yield world
    leave(world)
    assert not worlds.dist.is_initialized()


def test_its_collectives_return_what_one_rank_gives_and_ddp_keeps_its_buckets(alone):
    assert (alone.world_size, alone.backend, alone.connected) == (1, "gloo", True)
    assert worlds.dist.get_world_size() == 1
    tensor = torch.tensor([1.0, 2.0])
    reduced = alone.reduce(tensor)
    assert reduced is not tensor
    assert reduced.tolist() == tensor.tolist()
    alone.add_up(tensor)
    alone.take_from_main(tensor)
    alone.barrier()
    assert tensor.tolist() == [1.0, 2.0]
    assert alone.gather("a") == ["a"]
    assert alone.broadcast({"a": 1}) == {"a": 1}
    assert alone.on_every(lambda: 3) == alone.on_main(lambda: 3) == 3
    wrapped = wrap(nn.Linear(2, 2), alone, Settings(bucket_cap_mb=3))
    assert isinstance(wrapped, DistributedDataParallel)
    assert wrapped.bucket_bytes_cap == 3 << 20
    strategy = _Strategy(parallel_devices=[alone.device])
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    for wrapped in (wrap(models[0], alone, Settings()), strategy._setup_model(models[1])):
        for _ in range(2):
            wrapped(torch.ones(1, 2)).sum().backward()
        assert not wrapped._has_rebuilt_buckets


def test_a_training_with_the_group_has_the_same_bits(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path)
    for name, variable in {"plain": "0", "group": "1"}.items():
        monkeypatch.setenv(GROUP_OF_ONE, variable)
        flags = ("--device", "cpu", "--epochs", "2", "--accumulate", "3", "--clip-norm", "0.1")
        trained(recipe, tmp_path / name, *flags)
    assert_same_training(tmp_path / "group", tmp_path / "plain", tolerance=0)
    waits = {
        name: next(r for r in all_records(tmp_path / name) if r["event"] == "epoch")["phases"]
        for name in ("plain", "group")
    }
    assert waits["plain"]["all_reduce"] == 0.0 < waits["group"]["all_reduce"]
    world = find_world("cpu", environment={GROUP_OF_ONE: "0"})
    assert not world.connected
    model = nn.Linear(2, 2)
    assert wrap(model, world, Settings()) is model


COMPLEX = """
class Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.full((4, 2), 0.5 + 2j))
        self.register_buffer("phase", torch.tensor([1 + 2j, 3 - 4j]))
    def forward(self, x): return (x.to(self.turn.dtype) @ self.turn + self.phase).abs()
recipe = Recipe(model=Rotating, data=data, settings={"epochs": 1, "batch_size": 10})
"""


def test_complex_weights_and_buffers_stay_complex_and_train_the_same_on_two_ranks(tmp_path):
    (tmp_path / "rotating.py").write_text(RECIPE + COMPLEX)
    loaded = []
    for ranks in (1, 2):
        flags = ("--precision", "fp64", "--run-dir", str(tmp_path / f"{ranks}"))
        run("train", str(tmp_path / "rotating.py"), *flags, world_size=ranks, folder=tmp_path / "r")
        loaded.append(samestep.load(tmp_path / f"{ranks}", checkpoint="last").state_dict())
    one, two = loaded
    assert one["turn"].dtype == one["phase"].dtype == torch.complex128
    assert one["phase"].tolist() == [1 + 2j, 3 - 4j]
    assert (one["turn"].imag - 2).abs().min() > 0
    torch.testing.assert_close(one["turn"], two["turn"], rtol=0, atol=1e-12)
