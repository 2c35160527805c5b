"""The recipe cricket from the command line, on made-up matches."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samestep import UserError
from samestep.core.recipe import find_recipe
from samestep.core.recipes.cricket.recipe import CricketOptions
from samestep.core.recipes.cricket.scores import runs_errors
from samestep.core.recipes.cricket.synthetic import documents
from samestep.core.session.trained_model import evaluate_run
from samestep.shell.cli import main
from tests.command_line import train_here
from tests.cricket_files import ball, innings, match, write
from tests.needs import needs

# It is trained once for all of them.
pytestmark = [needs("torch_geometric"), pytest.mark.xdist_group("cricket")]

SCORED = Path(__file__).parents[3] / "benchmarks" / "results" / "cricket" / "run"
SMALL = ("--balls-per-match", "12", "--width", "8", "--threads", "1", "--max-steps", "8")


def train(folder, *flags):
    train_here("cricket", "--run-dir", str(folder / "run"), *SMALL, *flags)
    return folder / "run"


@pytest.fixture(scope="module")
def matches(tmp_path_factory):
    return write(tmp_path_factory.mktemp("matches"), dict(documents(12, seed=1)))


@pytest.fixture(scope="module")
def trained(matches, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cricket")
    flags = ("--data-dir", str(matches), "--cache-dir", str(folder / "kept"))
    return train(folder, *flags)


def test_it_trains_on_files_and_tells_errors_beside_what_has_to_be_beaten(trained):
    result = json.loads((trained / "result.json").read_text())
    told, baselines = result["test"], result["baselines"]
    assert {"mae", "rmse", "r2", "median_error", "mae_powerplay", "mae_innings_2"} <= told.keys()
    assert result["best"]["metric"] == "mae"
    assert baselines.keys() == {"constant", "run_rate", "table", "trees_mae", "trees_mse"}
    assert all(row.keys() == {"mae", "rmse", "r2", "median_error"} for row in baselines.values())
    assert baselines["table"]["mae"] < baselines["constant"]["mae"]


def balls_in(files):
    return sum(file.count(b'"non_striker"') for file in files.values())


def test_the_kept_run_scores_all_matches_of_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = dict(documents(3, seed=1))
    folder = write(tmp_path / "matches", files)
    found = evaluate_run(SCORED, "best", split="test", data_dir=str(folder))
    assert found["samples"] == balls_in(files)
    assert 0 < found["mae"] < 60


@pytest.mark.parametrize("year", [b"2010", b"2024"])
def test_other_matches_are_all_evaluated_whatever_their_dates(trained, tmp_path, year):
    others = {name: file.replace(b'"2020-', b'"' + year + b"-") for name, file in documents(3, 9)}
    others = {name: file.replace(b"id-P", b"id-Q") for name, file in others.items()}
    odd = {
        "abandoned.json": {**match(), "innings": []},
        "one.json": match(innings("C", [ball(1), ball(2)]), teams=["C", "D"], venue="Nowhere"),
        "unknown.json": match(version="2.0.0"),
    }
    other = write(tmp_path, others | odd)
    found = evaluate_run(trained, data_dir=str(other), skip_bad=1)
    assert found["samples"] == balls_in(others) + 2
    assert len(found["notes"]) == 2
    with pytest.raises(UserError, match="unknown"):
        evaluate_run(trained, data_dir=str(other))


def test_what_a_run_was_trained_on_is_never_its_test(matches, trained, tmp_path):
    measured = json.loads((trained / "result.json").read_text())["test"]
    again = {f"renamed-{name}": file for name, file in documents(12, seed=1)}
    found = evaluate_run(trained, data_dir=str(write(tmp_path / "again", again)))
    assert (found["samples"], found["mae"]) == (measured["samples"], pytest.approx(measured["mae"]))
    more = {f"more-{name}": file for name, file in documents(2, seed=5)}
    found = evaluate_run(trained, data_dir=str(write(tmp_path / "more", again | more)))
    assert found["samples"] == measured["samples"] + balls_in(more)
    one = write(tmp_path / "one", {"one.json": next(documents(1, seed=1))[1]})
    with pytest.raises(UserError, match=str(one)):
        evaluate_run(trained, data_dir=str(one))


def test_a_match_is_predicted_ball_by_ball_beside_the_actual_runs(trained, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    name, file = next(documents(1, seed=3))
    strange = file.replace(b"id-P", b"id-Q").replace(b"Team ", b"Stranger ")
    path, png = write(tmp_path, {name: strange}) / name, tmp_path / "match.png"
    assert main(["predict", str(trained), str(path), "--json", "--plot", str(png)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [
        (f"{over['over']}.{number}", place, delivery["runs"]["total"])
        for place, side in enumerate(json.loads(file)["innings"], 1)
        for over in side["overs"]
        for number, delivery in enumerate(over["deliveries"], 1)
    ]
    assert [(row["ball"], row["innings"]) for row in rows] == [place[:2] for place in told]
    first_five = [runs for ball, side, runs in told if side == 1 and int(ball.split(".")[0]) < 5]
    assert rows[0]["actual"] == sum(first_five)
    assert all(isinstance(row["predicted"], float) for row in rows)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["predict", str(trained), str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0].split() == ["row", "ball", "innings", "predicted", "actual"]
    assert {len(line) for line in lines} == {len(lines[0])}


@pytest.mark.parametrize(
    "card", [match(version="3.0.0"), {**match(), "innings": []}, match(match_type="ODI"), b"{"]
)
def test_what_is_no_match_with_balls_is_not_predicted(trained, tmp_path, capsys, card):
    path = write(tmp_path, {"match.json": card}) / "match.json"
    assert main(["predict", str(trained), str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problem"]


@pytest.mark.parametrize("convolution", ["sage", "gatv2", "transformer"])
def test_each_convolution_uses_every_parameter(convolution):
    recipe = find_recipe("cricket")
    options = recipe.complete_options(
        CricketOptions(
            synthetic=True, synthetic_matches=6, convolution=convolution, width=8, rounds=2
        )
    )
    torch.manual_seed(0)
    model, data = recipe.build_model(options), recipe.load_data(options).train
    graphs = recipe.collate([data[k] for k in (0, 40, 90)])
    outputs = model.eval()(graphs)
    assert outputs.shape == (3,)
    recipe.loss(outputs, graphs).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"validation_from": "2024-02-30"}, "--validation-from"),
        ({"test_from": "20240101"}, "--test-from"),
        ({"validation_from": "2024-02-02", "test_from": "2024-02-01"}, "--validation-from"),
        ({"synthetic": True, "data_dir": "matches"}, "--data-dir"),
        ({"without": ("preceeds",)}, "precedes"),
    ],
)
def test_options_that_cannot_be_are_refused(options, told):
    with pytest.raises(UserError, match=told):
        CricketOptions(**options)


def test_one_of_the_dates_is_kept_and_errors_of_parts_are_those_of_the_whole():
    def complete(**given):
        options = CricketOptions(synthetic=True, synthetic_matches=20, **given)
        return find_recipe("cricket").complete_options(options)

    usual = complete()
    days = (usual.validation_from, usual.test_from)
    assert complete(validation_from=days[0]) == complete(test_from=days[1]) == usual
    some = complete(teams=("Team 1",))
    assert (some.teams, some.players, some.used) == (("Team 1",), usual.players, usual.used)
    with pytest.raises(UserError, match="--validation-from DATE"):
        complete(test_from=days[0])
    drawn = torch.Generator().manual_seed(0)
    y, out = (torch.randn(50, generator=drawn) * 10 for _ in range(2))
    group = torch.stack([torch.arange(50) % 3, torch.arange(50) % 2], dim=1)
    found = runs_errors()
    for metric in found.values():
        for some in (slice(0, 13), slice(13, 50)):
            metric.update(out[some], {"query": SimpleNamespace(y=y[some], group=group[some])})
    error = (out - y).abs()
    assert found["mae"].compute() == pytest.approx(float(error.mean()), rel=1e-5)
    assert found["rmse"].compute() == pytest.approx(float(error.square().mean().sqrt()), rel=1e-5)
    assert found["median_error"].compute() == pytest.approx(float(error.quantile(0.5)))
    middle = float(error[group[:, 0] == 1].mean())
    assert found["mae_middle"].compute() == pytest.approx(middle, rel=1e-5)


UNUSABLE = {
    "one is bad": ({**dict(documents(4, seed=0)), "0123.json": b"{'"}, "--skip-bad 1"),
    "no innings": ({"1.json": {**match(), "innings": []}}, "no innings"),
    "one date": ({f"{n}.json": match() for n in range(5)}, "--split-by random"),
}


@pytest.mark.parametrize(("cards", "told"), UNUSABLE.values(), ids=UNUSABLE)
def test_matches_that_cannot_be_used_are_one_message(tmp_path, refused, cards, told):
    places = ("--data-dir", str(write(tmp_path / "m", cards)), "--run-dir", str(tmp_path / "run"))
    message = refused("train", "cricket", *SMALL, *places, "--cache-dir", str(tmp_path / "kept"))
    assert told in message
    assert not (tmp_path / "run").exists()
