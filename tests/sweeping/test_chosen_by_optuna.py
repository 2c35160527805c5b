"""Which trainings of a sweep Optuna chooses, without training them."""

import json
from pathlib import Path

import pytest

from samestep.cluster.sweeping.chosen_by_optuna import OptunaChoice
from samestep.cluster.sweeping.sweep_plan import SweepPlan

pytest.importorskip("optuna")


def plan(folder: Path, sample: int, seeds: int = 4) -> SweepPlan:
    axes = {"lr": tuple(f"{n / 10}" for n in range(1, 11)), "seed": tuple(map(str, range(seeds)))}
    return SweepPlan(
        folder=folder, recipe="spiral", flags=(), axes=axes, sample=sample, optuna=True, seed=1
    )


def train(sweep: SweepPlan, name: str, mode: str = "min") -> None:
    """Leave what a training leaves: the nearer its learning rate is to 0.7, the better."""
    away = abs(float(sweep.points[name]["lr"]) - 0.7)
    best = {"metric": "loss", "mode": mode, "value": away if mode == "min" else -away}
    sweep.run_dir(name).mkdir(exist_ok=True)
    result = {"status": "completed", "best": best}
    (sweep.run_dir(name) / "result.json").write_text(json.dumps(result))


def chosen(sweep: SweepPlan, mode: str = "min") -> list[str]:
    choice, names = OptunaChoice(sweep), []
    while name := choice.next():
        train(sweep, name, mode)
        choice.ended(name)
        names.append(name)
    return names


def test_as_many_as_the_sample_are_trained_and_none_twice_also_if_one_fails(tmp_path):
    names = chosen(plan(tmp_path, 20, seeds=2))  # of 20: it ends although Optuna repeats itself
    assert sorted(names) == sorted(plan(tmp_path, 20, seeds=2).points)
    choice = OptunaChoice(plan(tmp_path / "failed", 2))
    choice.ended(choice.next())  # it left no result
    assert choice.next()
    assert not choice.next()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_later_choices_are_nearer_to_the_best_than_those_drawn_at_random_first(tmp_path, mode):
    sweep = plan(tmp_path, 40, seeds=30)
    away = [abs(float(sweep.points[name]["lr"]) - 0.7) for name in chosen(sweep, mode)]
    # With other seeds of the choice it is 0.5 to 0.7; at random it is 1.
    assert sum(away[-20:]) / 20 < 0.85 * sum(away[:10]) / 10


def test_after_a_kill_the_unfinished_come_first_and_the_completed_are_not_trained_again(tmp_path):
    sweep = plan(tmp_path, 12)
    choice = OptunaChoice(sweep)
    done, killed = choice.next(), choice.next()
    train(sweep, done)
    choice.ended(done)
    sweep.run_dir(killed).mkdir()
    names = chosen(sweep)
    assert names[0] == killed
    assert done not in names
    assert len({done, *names}) == 12
