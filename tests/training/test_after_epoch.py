"""What a recipe does after each epoch is done once, and a resumed run continues with it."""

import re
import signal

import pytest
import torch
from torch import nn

from samestep import Settings
from samestep.core.data.order import epoch_order
from tests import tiny
from tests.faults import Fault

AFTER = """
def model(options):
    net = nn.Sequential(nn.Linear(8, options.hidden), nn.Tanh(), nn.Linear(options.hidden, 2))
    net[0].requires_grad_(False)
    return net
def after_epoch(model, end):
    if end.epoch == 2: model[0].requires_grad_(True)
    if end.epoch == 4: model[2].bias.requires_grad_(False)
    with (Path(__file__).parent / "calls").open("a") as file:
        file.write(f"{end.epoch} {end.step} {end.metrics['loss']}\\n")
    model[2].bias.mul_(0.5)
    square = model[0].weight.square().sum().item()  # with fsdp, of the parts of all ranks
    return {"norm": model[0].weight.norm(), "square": square, "drawn": torch.rand(()).item()}
recipe = Recipe(after_epoch=after_epoch, """
RECIPE = tiny.RECIPE.replace("recipe = Recipe(", AFTER)
OWN = "recipe = Recipe(optimizer=lambda m, s: torch.optim.Adam(m[2].parameters(), lr=s.lr), "
RATE = """held = []
def opened(m, s): held[:] = [torch.optim.Adam(m.parameters(), lr=s.lr)]; return held[0]
def after_epoch(model, end): held[0].param_groups[0]["lr"] /= 2
recipe = Recipe(optimizer=opened, """
FLAGS = ("--weight-decay", "0.1", "--ema", "0.9")


def by_hand(splits, net) -> nn.Module:
    """Train as a plain loop would, and return the model."""
    x, y = splits.train
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1)
    for epoch in range(6):
        for places in epoch_order(131, Settings(batch_size=12, epochs=6).seed, epoch).split(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[places]), y[places]).backward()
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            net[2].bias.mul_(0.5)
        net[0].requires_grad_(requires_grad=epoch >= 1)
        net[2].bias.requires_grad_(requires_grad=epoch < 3)
    return net


def test_layers_are_unfrozen_and_values_recorded_as_in_a_plain_loop(tmp_path):
    """Also where a run stops and goes on with what was frozen at the end of its last epoch."""
    recipe = tiny.write_recipe(tmp_path, RECIPE)
    tiny.trained(recipe, tmp_path / "one", *FLAGS)
    lines = (tmp_path / "calls").read_text().splitlines()
    validated = [r["loss"] for r in tiny.events(tmp_path / "one", "evaluation")[:6]]
    assert lines == [f"{n} {11 * n} {loss}" for n, loss in enumerate(validated, 1)]
    epochs = tiny.events(tmp_path / "one", "epoch")
    assert len({r["metrics"]["drawn"] for r in epochs}) == len(epochs) == 6
    norms = [r["metrics"]["norm"] for r in epochs]
    assert norms[0] == norms[1] != norms[2] != norms[3]
    space: dict = {"__file__": str(recipe)}
    exec(RECIPE, space)
    torch.manual_seed(Settings(batch_size=12, epochs=6).seed)
    net = by_hand(space["data"](space["Options"]()), space["model"](space["Options"]()).double())
    tiny.assert_close(
        dict(net.state_dict()), dict(tiny.last_state(tmp_path / "one")["model"]), 1e-12
    )

    tiny.trained(recipe, tmp_path / "run", *FLAGS, "--max-steps", "44")
    tiny.resumed(tmp_path / "run", "--max-steps", "66")
    tiny.assert_same_training(tmp_path / "run", tmp_path / "one", 0)


@pytest.mark.slow
def test_on_two_ranks_through_a_kill_with_virtual_ranks_and_with_fsdp_it_is_the_same(tmp_path):
    recipe = tiny.write_recipe(tmp_path, RECIPE)
    killed = Fault("after a step", 27, signal.SIGKILL, rank=None)
    tiny.struck(recipe, tmp_path / "killed", killed, *FLAGS, on=2)
    tiny.resumed(tmp_path / "killed")
    virtual, fsdp = (*FLAGS, "--virtual-ranks", "5"), (*FLAGS, "--strategy", "fsdp")
    tiny.trained(recipe, tmp_path / "one", *virtual)
    words = [[recipe, "--run-dir", tmp_path / "two", *virtual]]
    words.append([recipe, "--run-dir", tmp_path / "fsdp", *fsdp, "--max-steps", "44"])
    words.append([tmp_path / "fsdp", "--resume", "--max-steps", "66"])
    tiny.train_all(words, on=2, folder=tmp_path)
    tiny.assert_same_training(tmp_path / "two", tmp_path / "one", 0)
    for name in ("killed", "fsdp"):
        tiny.assert_same_training(tmp_path / name, tmp_path / "one", 1e-11)


MISTAKES = {
    "no dict": ('return {"norm"', 'return 3 or {"norm"', "a dict of numbers"),
    "no number": (".norm()", "", "'norm'"),
    "taken": ('"norm":', '"accuracy":', "'accuracy'"),
    "fails": ("model[2].bias.mul_", "model[3].bias.mul_", "after epoch 1.*IndexError"),
    "all frozen": ("end.epoch == 2", "not model.requires_grad_(False)", "frozen all"),
    "not the optimizer's": ("recipe = Recipe(", OWN, "0.weight"),
    "replaces": ("model[2].bias.mul_(0.5)", "model[2] = nn.Linear(16, 2)", "parameters.*copy_"),
    "sets a rate": ("recipe = Recipe(", RATE, "groups of the optimizer.*schedule"),
    "no function": ("after_epoch=after_epoch", "after_epoch=3", "after_epoch"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_it_may_not_do_is_told_in_one_message(name, tmp_path, refused):
    old, new, says = MISTAKES[name]
    assert old in RECIPE
    recipe = tiny.write_recipe(tmp_path, RECIPE.replace(old, new))
    told = refused("train", str(recipe), "--run-dir", str(tmp_path / "run"))
    assert re.search(says, told)
