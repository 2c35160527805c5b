"""What a loop of one's own brings along: a GradScaler, averages, hooks, torch.compile."""

import signal
from itertools import pairwise

import pytest

from samestep import read_records
from tests.session.same import account, assert_close, assert_same
from tests.session.scripts import Strike, run, run_here, weights

SCRIPT = """
import sys
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
import samestep

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
