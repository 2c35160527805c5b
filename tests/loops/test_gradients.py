"""Gradients of one's own losses, added up over ranks, against those of a single process."""

import signal
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import samestep
from samestep import UserError, read_records
from samestep.core.loops import gradients
from samestep.core.loops.gradients import backward, parameters_of, weight_of
from samestep.launch.ranks.world import World
from tests.loops import scripts
from tests.loops.same import account, assert_close, assert_same
from tests.loops.scripts import Strike, run, run_here, weights
from tests.processes import run_ranks
from tests.tiny import changed, events

SHARES = {1: [range(7)], 3: [range(3), range(3, 5), range(5, 7)]}


def normalise(parameter: torch.Tensor) -> None:
    parameter.grad.div_(parameter.grad.norm())


def gradients_of(rank: int, world: World) -> list[torch.Tensor | None]:
    """Return the gradients of two losses, one after the other into the same place."""
    torch.manual_seed(0)
    x, terms = torch.randn(7, 3, dtype=torch.float64), torch.arange(1.0, 8)
    parts = nn.ModuleList([nn.Linear(3, 2) for _ in range(4)]).double()
    first, rare, never, other = parts
    mine = list(SHARES[world.world_size][rank])

    def loss_of(rows: list[int], weights: torch.Tensor) -> torch.Tensor:
        outputs = first(x[rows]).square().sum(1)
        if 6 in rows:  # one rank alone comes by here
            outputs = outputs + (x[rows] * (torch.tensor(rows)[:, None] == 6)) @ rare.weight[0]
        return (outputs * weights).sum() / weights.sum() + other(x[rows]).sum() * 0

    named, kept = parameters_of([first, rare, never]), {}
    for p in (first.weight, rare.weight):  # neither is linear: the sum is what they are to get
        p.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        p.register_post_accumulate_grad_hook(normalise)
    ones = torch.ones(len(mine))
    global_loss = backward(loss_of(mine, ones), named, world, len(mine) / 7, kept=kept)
    loss = loss_of(mine, terms[mine])
    weight = weight_of(len(mine) / 7, terms[mine].sum(), loss, world)
    backward(loss, named, world, weight, kept=kept)
    found = [p.grad for p in parts.parameters()]
    # A rank without a word has a loss of NaN, and counts for nothing.
    extra = nn.Linear(3, 1).double()
    words = torch.arange(7) < 2  # the first rank has them all
    errors = extra(x[mine]).squeeze(1) * words[mine]
    loss = errors.sum() / words[mine].sum()
    weight = weight_of(len(mine) / 7, words[mine].sum(), loss, world)
    backward(loss, parameters_of([extra]), world, weight)
    found += [p.grad for p in extra.parameters()]
    turned = nn.Parameter(torch.ones(3, dtype=torch.complex128))
    with warnings.catch_warnings(action="error"):  # of an imaginary part that is dropped
        loss = (x[mine].to(turned) @ turned).abs().sum() / 7
        backward(loss, [turned], world, weight=1.0)
    found.append(turned.grad)
    with pytest.raises(UserError, match="0 terms"):
        weight_of(len(mine) / 7, 0, loss, world)
    return [*found, global_loss]


def gradients_by_sizes(sizes: list[tuple[int, int]]) -> list[list[torch.Tensor | None]]:
    """Return them for each size of a bucket and of a gradient that travels by itself."""
    from samestep import dist

    rank, *_ = dist.setup_distributed(device="cpu")
    found = []
    for bucket, large in sizes:
        gradients._BUCKET_BYTES, gradients._LARGE_BYTES = bucket, large
        found.append(gradients_of(rank, dist.current_world()))
    dist.cleanup()
    return found


def test_two_losses_add_up_to_what_one_process_has(tmp_path):
    expected, sizes = gradients_of(0, World()), [(8, 1), (8, 99), (99, 33)]
    for of_rank in run_ranks(gradients_by_sizes, 3, tmp_path, sizes):
        for found in of_rank:
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    used = [gradient is not None for gradient in expected[:-1]]
    # Of the second part its weight alone, nothing of the third; nobody named the fourth.
    assert used == [True, True, True, False, False, False, False, False, True, True, True]


def test_what_is_to_be_trained_may_be_a_module_an_optimizer_or_a_parameter():
    model, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1)
    expected = [model.weight, model.bias]
    for named in ([model], [optimizer], expected, [model, optimizer, frozen]):
        assert list(map(id, parameters_of(named))) == list(map(id, expected))
    for nothing in ([], [frozen], ["model"]):
        with pytest.raises(UserError, match=r"run\.backward"):
            parameters_of(nothing)


class Recorded(World):
    """Two ranks of which the other has no samples; notes when something is sent and awaited."""

    @property
    def connected(self):
        return True

    def begin_add_up(self, tensor):
        Recorded.events.append(f"sent {tensor.numel()}")
        tensor[-1] *= self.world_size
        return lambda: Recorded.events.append("awaited")


def test_gradients_are_sent_while_backward_computes_others(monkeypatch):
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", 8)
    world = Recorded(world_size=2)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    for layer in model:
        layer.register_full_backward_pre_hook(lambda *_: Recorded.events.append("layer"))
    named, kept, x = parameters_of([model]), {}, torch.rand(2, 3, requires_grad=True)
    how = {"step": 1, "kept": kept}
    for _ in range(2):  # the same buffers again
        Recorded.events = []
        backward(model(x).sum(), named, world, 1.0, **how)
        layers = ["layer", "sent 9", "layer", "sent 9", "layer", "sent 14"]
        assert Recorded.events == [*layers, *["awaited"] * 3]
    # The last layer is not used: its bucket comes first on all ranks, so the others wait for it.
    Recorded.events = []
    backward(model[:2](x).sum(), named, world, 1.0, **how)
    assert Recorded.events[:2] == ["layer"] * 2
    for n in range(20):  # a script may name others in each step
        alone = [named[n % 3], nn.Parameter(torch.ones(1))]
        backward(alone[0].sum() + alone[1].sum(), alone, world, 1.0, **how)
    assert len(kept) == gradients._MOST_KEPT


SCRIPT = """
import sys, torch, samestep
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
with samestep.open_run("run", seed=3, resume=True, log_every=1, checkpoint_every_steps=1) as run:
    x = torch.randn(42, 4)
    y = x.sin().sum(1, keepdim=True)
    model = run.place(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    net = torch.compile(model) if "compile" in sys.argv else model
    # What is clipped for each rank by itself adds up to something else.
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    state = {"model": model, "average": average, "optimizer": optimizer, "scaler": scaler}
    for epoch in run.epochs(2, state=state):
        for batch in run.batches((x, y), 7):
            inputs, targets = batch.data
            loss = nn.functional.mse_loss(net(inputs), targets)
            run.log(loss=loss, scale=scaler.get_scale())
            if 5 in batch.indices:  # one rank alone overflows, and all leave out the step
                loss = loss + model[2].bias.sum() * float("inf")
            optimizer.zero_grad()
            run.backward(scaler.scale(loss), model)
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
        for batch in run.validation((x, y), 20):
            inputs, targets = batch.data
            run.log(loss=nn.functional.mse_loss(average(inputs), targets))
"""


COMPILES = [pytest.mark.slow, pytest.mark.xdist_group("compiled")]


@pytest.mark.parametrize("what", ["eager", pytest.param("compile", marks=COMPILES)])
def test_with_scaler_average_and_hooks_it_trains_alike_on_two_ranks_and_goes_on(tmp_path, what):
    script, folder = tmp_path / "script.py", tmp_path / "two"
    script.write_text(SCRIPT)
    folder.mkdir()
    assert run_here(script, what) == 0
    on_two = {"world_size": 2, "folder": folder}
    run(script, what, **on_two, strike=Strike(5, signal.SIGTERM), code=128 + signal.SIGTERM)
    run(script, what, **on_two)
    one, two = tmp_path / "run", folder / "run"
    assert_same(two, one)
    assert any(r["event"] == "resume" for r in read_records(two))
    scales = [r["scale"] for r in account(one) if r["event"] == "step"]
    assert {b > a for a, b in pairwise(scales) if a != b} == {True, False}
    saved = weights(one)
    with pytest.raises(AssertionError):
        assert_close(saved["average"]["module.0.weight"], saved["model"]["0.weight"], 1e-6)


LOOP = """
import sys, torch, samestep
import torch.nn.functional as F
from torch import nn
x = torch.randn(29, 2, 8, generator=torch.Generator().manual_seed(0))
with samestep.open_run(sys.argv[1], log_every=1) as run:
    net = run.place(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in run.epochs(2, state={"net": net, "optimizer": optimizer}):
        for batch in run.batches(x, global_batch_size=9):  # of the last 2, a third rank has none
            one, other = (F.normalize(net(batch.data[:, k]), dim=1) for k in (0, 1))
            one, other = samestep.gather(one), samestep.gather(other)
            loss = F.cross_entropy(5 * one @ other.T, torch.arange(batch.global_size))
            optimizer.zero_grad()
            run.backward(loss, net)
            optimizer.step()
            run.log(loss=loss, slope=net[0].weight.grad.norm())
"""


def test_a_contrastive_loop_is_the_same_on_any_number_of_ranks(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    assert scripts.run_here(script, "alone") == 0
    scripts.run(script, "three", world_size=3, folder=tmp_path)
    alone, three = (
        [(step["step"], step["loss"], step["slope"]) for step in events(tmp_path / name, "step")]
        for name in ("alone", "three")
    )
    assert len(alone) == 8
    assert three == [pytest.approx(numbers, rel=1e-11) for numbers in alone]


ONLY = "(samestep.gather(v) if run.is_main else v for v in (one, other))"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samestep.gather(one), samestep.gather(other)": ONLY}, "samestep.gather"),
        ({"samestep.gather(one)": "samestep.gather(one[:, :8 - run.rank])"}, "(7,)"),
    ],
    ids=["left out", "other rows"],
)
def test_what_one_rank_does_otherwise_is_told_and_nobody_waits(tmp_path, changes, told):
    script = tmp_path / "loop.py"
    script.write_text(changed(LOOP, *changes.items(), ("batch.global_size", "len(one)")))
    assert told in scripts.refused(script, "run", world_size=2, folder=tmp_path)


def test_outside_of_a_run_it_is_refused_but_where_the_ranks_are_set_up(tmp_path):
    x = torch.ones(3, 2)
    for given in (x, torch.ones(()), [1.0]):
        with pytest.raises(UserError):
            samestep.gather(given)
    samestep.dist.setup_distributed(device="cpu")
    assert samestep.gather(x) is x
    samestep.dist.cleanup()
    with pytest.raises(RuntimeError), samestep.open_run(tmp_path / "run"):
        raise RuntimeError
    with pytest.raises(UserError):
        samestep.gather(x)
