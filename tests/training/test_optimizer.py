"""The optimizer's step by its fused kernel is the step that torch.optim takes."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from samestep import Settings
from samestep.core.learner.optimizer import Update, make_optimizer, set_lr
from samestep.core.learner.optimizer_state import load_state
from samestep.core.learner.quick_step import quick_step, step_by_lists

OPTIMIZERS = {
    "adam": {"optimizer": "adam"},
    "adam with decay": {"optimizer": "adam", "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "sgd": {"optimizer": "sgd"},
    "sgd with momentum": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
}
RATES = [0.1, 0.05, 0.2, 0.0, 0.1, 0.03]


def small_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def backward(model, step, unused=False):
    """Leave the gradients of a step; the last layer takes no part if it is unused."""
    for parameter in model.parameters():
        parameter.grad = None
    inputs = torch.randn(7, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    outputs = model[:2](inputs) if unused else model(inputs)
    outputs.square().mean().backward()


def assert_equal_optimizers(one, other):
    assert one.state_dict()["state"].keys() >= other.state_dict()["state"].keys()
    for number, state in other.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(one.state_dict()["state"][number][key], value), key


# torch's own fused SGD fails where a layer's momentum begins after the first step.
CASES = [
    pytest.param(told, unused, id=f"{name}, unused in {unused}")
    for name, told in OPTIMIZERS.items()
    for unused in ((), (0,), (2,), (0, 3, 4))
    if not (0 in unused and "momentum" in told)
]


@pytest.mark.parametrize(("told", "unused"), CASES)
def test_its_steps_are_those_of_torch_to_the_last_bit(told, unused):
    settings = Settings(**told)
    one, other = small_model(), small_model()
    ours = make_optimizer(one.parameters(), settings, 0.5, torch.device("cpu"))
    theirs = make_optimizer(other.parameters(), settings, 0.5, torch.device("cpu"))
    update = Update(ours)
    for step, lr in enumerate(RATES):
        backward(one, step, step in unused)
        backward(other, step, step in unused)
        update(lr)
        set_lr(theirs, lr)
        theirs.step()
        for mine, its in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
    assert_equal_optimizers(ours, theirs)


@pytest.mark.parametrize("told", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_restored_optimizer_goes_on_from_the_state_it_was_given(told):
    settings = Settings(**told)
    whole, resumed = small_model(), small_model()
    first = make_optimizer(whole.parameters(), settings, 0.1, torch.device("cpu"))
    update = Update(first)
    for step in range(3):
        backward(whole, step)
        update(0.1)
    resumed.load_state_dict(whole.state_dict())
    second = make_optimizer(resumed.parameters(), settings, 0.1, torch.device("cpu"))
    second_update = Update(second)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(3, 6):
        for model, take in ((whole, update), (resumed, second_update)):
            backward(model, step)
            take(0.1)
    for mine, its in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert_equal_optimizers(second, first)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)],
)
def test_it_is_the_optimizer_asked_for_with_its_settings_and_fused(name, kind):
    more = {"momentum": 0.8} if name == "sgd" else {}
    settings, model = Settings(optimizer=name, weight_decay=0.3, **more), small_model()
    model[0].requires_grad_(False)
    made = make_optimizer(model.parameters(), settings, 0.25, torch.device("cpu"))
    (group,) = made.param_groups
    assert type(made) is kind
    assert (group["lr"], group["weight_decay"], group["fused"]) == (0.25, 0.3, True)
    assert group.get("momentum", 0.8) == 0.8
    assert [p.shape for p in group["params"]] == [(3, 5), (3,)], "frozen weights are left out"


@pytest.mark.parametrize(("saved", "own"), [(False, True), (True, False)])
def test_a_restored_optimizer_keeps_the_kernel_that_it_was_built_with(saved, own):
    """Lightning's mixed precision saves without the fused one, and a fused step counts on a GPU."""
    device, settings = torch.device("cpu"), Settings()
    one, other = small_model(), small_model()
    before = make_optimizer(one.parameters(), settings, 0.1, device, fuse=saved)
    after = make_optimizer(other.parameters(), settings, 0.1, device, fuse=own)
    backward(one, 0)
    before.step()
    kept = copy.deepcopy(before.state_dict())
    load_state(after, kept)
    assert after.param_groups[0]["fused"] is own
    assert kept["param_groups"][0]["fused"] is saved
    other.load_state_dict(one.state_dict())
    for model, optimizer in ((one, before), (other, after)):
        backward(model, 1)
        optimizer.step()
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=0)


def test_a_first_step_that_the_scaler_skips_leaves_no_momentum():
    settings = Settings(optimizer="sgd", momentum=0.9, precision="fp16")
    weight = nn.Parameter(torch.ones(40))
    optimizer = make_optimizer([weight], settings, 0.1, torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    spare = [torch.full((40,), 7e8) for _ in range(50)]
    del spare  # new memory is not zero
    for gradient in (torch.inf, 2.0):
        weight.grad = torch.full((40,), gradient)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if gradient == torch.inf:
            assert torch.equal(weight, torch.ones(40))
    assert torch.equal(weight, torch.full((40,), 0.9))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([torch.optim.Adam, torch.optim.AdamW]),
    st.sampled_from([{}, {"foreach": False}, {"fused": True}]),
    st.booleans(),
    st.lists(st.sampled_from(["", "unused", "loaded", "hooked", "cleared", "tensor", "less"])),
)
def test_a_users_optimizer_steps_quickly_to_the_same_bits(kind, how, maximize, events):
    models, seen = (small_model(), small_model()), []
    groups = [[{"params": m[0].parameters()}, {"params": m[2].parameters(), "weight_decay": 0.1}]
              for m in models]  # fmt: skip
    quick, plain = (kind(g, lr=0.1, maximize=maximize, amsgrad=maximize, **how) for g in groups)
    step_by_lists(quick)
    take_step = quick_step(quick)
    for step, event in enumerate(events):
        for model, optimizer in zip(models, (quick, plain), strict=True):
            backward(model, step, unused=event == "unused" and not (step == 0 or "fused" in how))
            lr = 0.1 / (step + 1)
            optimizer.param_groups[0]["lr"] = torch.tensor(lr) if event == "tensor" else lr
            if event == "loaded":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif event == "cleared":
                optimizer.state.clear()
            elif event == "less":
                optimizer.param_groups[1]["params"] = [model[2].bias]
                optimizer.state.pop(model[2].weight, None)
        hook = quick.register_step_post_hook(lambda *_: seen.append(1))
        hook.remove() if event != "hooked" else None
        take_step()
        hook.remove()
        plain.step()
        assert_equal_optimizers(quick, plain)
    assert len(seen) == events.count("hooked")
    assert quick.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_weights_in_bfloat16_move_as_those_in_float32(optimizer):
    """Of 40 numbers, so that vectorised kernels take part."""
    settings = Settings(optimizer=optimizer, precision="bf16", param_dtype="bf16")
    moved = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(torch.ones(40, dtype=dtype))
        built = make_optimizer([weight], settings, 0.25, torch.device("cpu"))
        for _ in range(3):
            weight.grad = torch.ones_like(weight)
            built.step()
        moved.append(weight.detach().float())
    torch.testing.assert_close(*moved, rtol=0.01, atol=0.01)
