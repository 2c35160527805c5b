"""The average of the weights: what it is, that it is evaluated and saved, and goes on exactly."""

import copy
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep import read_records
from samestep.core.learner.averages import Average
from samestep.core.session.prediction import ask
from samestep.core.session.trained_model import evaluate_run, open_checkpoint
from samestep.core.training.snapshot import evaluated_weights, load_evaluated
from tests import tiny
from tests.command_line import read_json
from tests.faults import Fault

FLAGS = ("--ema", "0.9", "--epochs", "2", "--lr", "0.05")


def change(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype))


def test_it_follows_the_formula_and_the_model_has_it_only_meanwhile():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    model[0].weight.requires_grad_(False)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    expected = {name: weight.detach().clone() for name, weight in trained.items()}
    average = Average(model, 0.8)
    for step in range(7):
        change(model, step)
        average.update()
        expected = {n: 0.8 * expected[n] + 0.2 * trained[n].detach() for n in trained}
    assert average.state().keys() == expected.keys()
    assert "0.weight" not in average.state(), "a frozen weight is its own average"
    for name, value in average.state().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-13, atol=1e-13)
    model[1].running_mean += 1
    before = copy.deepcopy(model.state_dict())
    with average.in_place():
        inside = copy.deepcopy(model.state_dict())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, value in inside.items():
        wanted = average.state().get(name, before[name])
        assert torch.equal(value, wanted), name
    assert not torch.equal(inside["2.weight"], before["2.weight"])
    with pytest.raises(KeyError), average.in_place():
        raise KeyError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_tied_weights_are_loaded_as_it_and_weights_in_bfloat16_move_it_in_float32():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    model[1].weight = model[0].weight
    before = model[0].weight.detach().float()
    model.places = nn.Parameter(torch.arange(3), requires_grad=False)
    average = Average(model, 0.999, frozen=True)  # of what may be trained later, too
    change(model[0], 1)
    for _ in range(3):
        average.update()
    expected = torch.lerp(model[0].weight.detach().float(), before, 0.999**3)
    torch.testing.assert_close(average.state()["0.weight"], expected)
    load_evaluated(model, state := {"model": model.state_dict(), "ema": average.state()})
    assert evaluated_weights(state)["0.weight"].dtype == torch.bfloat16, "as a file has it"
    assert model[1].weight is model[0].weight
    assert torch.equal(model[1].weight, expected.to(torch.bfloat16))


@pytest.fixture(scope="module")
def averaged(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("averaged")
    tiny.trained(tiny.write_recipe(folder), folder / "run", *FLAGS)
    return folder / "run"


def evaluations(run: Path) -> list[dict]:
    return [r for r in read_records(run) if r.get("split") == "validation"]


def test_what_is_evaluated_is_the_average_which_does_not_change_the_training(averaged, tmp_path):
    run, flags = tmp_path / "run", FLAGS[2:]
    tiny.trained(tiny.write_recipe(tmp_path), run, *flags)
    mine, its = tiny.last_state(run), tiny.last_state(averaged)
    for name, weight in mine["model"].items():
        assert torch.equal(weight, its["model"][name])
    assert "ema" not in mine
    steps = [[r["loss"] for r in read_records(p) if r["event"] == "step"] for p in (run, averaged)]
    assert steps[0] == steps[1]
    assert evaluations(run)[-1]["loss"] != evaluations(averaged)[-1]["loss"]
    state = tiny.last_state(averaged)
    opened = open_checkpoint(averaged, "last", device="cpu")
    own = opened.model.state_dict()
    assert state["ema"].keys() == own.keys()
    assert all(torch.equal(own[name], value) for name, value in state["ema"].items())
    assert not torch.equal(own["0.weight"], state["model"]["0.weight"])
    x, y = opened.recipe.load_data(opened.options).validation
    with torch.no_grad():
        outputs = opened.model(x)
    assert torch.allclose(ask(opened, list(x))[0], outputs, rtol=1e-12), "predictions are its, too"
    by_hand = float(nn.functional.cross_entropy(outputs, y))
    found = evaluate_run(averaged, "last", split="validation")["loss"]
    assert found == pytest.approx(by_hand, rel=1e-12)
    assert evaluations(averaged)[-1]["loss"] == pytest.approx(by_hand, rel=1e-12)
    result = read_json(averaged / "result.json")
    best = evaluate_run(averaged, "best", split="test")
    assert result["test"]["loss"] == pytest.approx(best["loss"], rel=1e-12)


@pytest.mark.parametrize(("after", "tolerance"), [(1, 0.0), (2, 1e-12)])
def test_a_stopped_run_goes_on_with_it_also_on_several_ranks(averaged, tmp_path, after, tolerance):
    run, recipe = tmp_path / "run", tiny.write_recipe(tmp_path)
    tiny.struck(recipe, run, Fault("after a step", nth=1, signum=signal.SIGTERM), *FLAGS)
    tiny.resumed(run, on=after)
    tiny.assert_same_training(run, averaged, tolerance)
    mine, its = tiny.last_state(run)["ema"], tiny.last_state(averaged)["ema"]
    assert mine.keys() == its.keys()
    assert all(float((mine[n] - its[n]).abs().max()) <= tolerance for n in mine)


@pytest.mark.parametrize("decay", ["1", "-0.1", "nan"])
def test_a_decay_that_is_none_is_refused(refused, decay):
    assert "--ema" in refused("train", "spiral", "--ema", decay)
