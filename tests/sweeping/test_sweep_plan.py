"""Which trainings a sweep has."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.base.errors import UserError
from samestep.cluster.sweeping.sweep_plan import SweepPlan, read_axes

VALUES = st.lists(
    st.text("abc123.", min_size=1, max_size=4), min_size=2, max_size=4, unique=True
).map(tuple)
AXES = st.dictionaries(
    st.sampled_from(["lr", "epochs", "hidden-dims"]), VALUES, min_size=1, max_size=3
)
MANY = {name: tuple(map(str, range(200))) for name in ("a", "b")}


def sweep(tmp_path, **more) -> SweepPlan:
    given = {"recipe": "spiral", "flags": (), "axes": {"lr": ("1", "2")}}
    return SweepPlan(folder=tmp_path / "sweep", **(given | more))


@given(axes=AXES)
def test_values_with_commas_between_them_are_read_back(axes):
    words = [word for flag, values in axes.items() for word in (f"--{flag}", ",".join(values))]
    assert read_axes(["--seed", "3", *words]) == (["--seed", "3"], axes)


def test_values_may_have_commas_and_switches_turn_on_and_off(tmp_path):
    words = ["--hidden-dims", "64 32,128 64", "--track", '"comet,mlflow",none', "--tag", '"a,b"']
    shared, axes = read_axes(words)
    assert axes == {"hidden-dims": ("64 32", "128 64"), "track": ("comet,mlflow", "none")}
    assert shared == ["--tag", "a,b"]
    found = sweep(tmp_path, axes={"drop-last": ("true", "false")}, flags=("--epochs", "1"))
    words = [found.words(point) for point in found.points.values()]
    assert words == [["--epochs", "1", "--drop-last"], ["--epochs", "1", "--no-drop-last"]]
    values = ("a/b", "a-b", "a b", "a:b", "x" * 300)
    found = sweep(tmp_path, axes={"data-dir": values})
    assert tuple(point["data-dir"] for point in found.points.values()) == values
    assert not any("/" in name or ":" in name or len(name) > 130 for name in found.points)


@given(axes=AXES, sample=st.none() | st.integers(1, 70), seed=st.integers(0, 9))
def test_the_points_are_the_grid_or_a_sample_of_it(tmp_path_factory, axes, sample, seed):
    found = sweep(tmp_path_factory.getbasetemp(), axes=axes, sample=sample, seed=seed)
    grid = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    points = [*found.points.values()]
    assert len(points) == min(len(grid), sample or len(grid))
    assert [point for point in grid if point in points] == points


def test_a_folder_keeps_one_sweep_of_one_recipe(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("recipe = 1\n")
    one = sweep(tmp_path, recipe=str(recipe))
    for _ in range(2):
        one.begin()
    kept = (one.folder / "sweep.json").read_text()
    assert [*json.loads(kept)["points"]] == ["lr=1", "lr=2"]
    with pytest.raises(UserError):
        sweep(tmp_path, recipe=str(recipe), axes={"lr": ("1", "3")}).begin()
    recipe.write_text("recipe = 2\n")
    with pytest.raises(UserError, match="edited"):
        sweep(tmp_path, recipe=str(recipe)).begin()
    assert (one.folder / "sweep.json").read_text() == kept


@pytest.mark.parametrize(
    "more", [{"axes": {}}, {"optuna": True}, {"optuna": True, "sample": 2, "axes": MANY}]
)
def test_a_sweep_without_choice_or_with_too_much_of_it_is_refused(tmp_path, more):
    given = {"folder": tmp_path, "recipe": "x", "flags": (), "axes": {"a": ("1", "2")}} | more
    with pytest.raises(UserError):
        SweepPlan(**given)
