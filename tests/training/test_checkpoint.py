"""Checkpoints: what is in them, which are kept, and what happens when one is damaged."""

import importlib.util
import itertools
import json
import os
import pickle
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep import UserError
from samestep.run import checkpoints, loading
from samestep.run.index import Entry, Index, Retention, announce
from samestep.run.index import read_index as read_written
from samestep.training import stopping
from tests.command_line import refusal
from tests.tiny import (
    RECIPE,
    STEPS,
    all_records,
    assert_same_training,
    files,
    last_state,
    read_index,
    resumed,
    sha256,
    trained,
    write_recipe,
)


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory) -> Path:
    """A run that stopped in its third epoch, with its recipe beside it."""
    folder = tmp_path_factory.mktemp("half")
    trained(write_recipe(folder), folder / "run", "--max-steps", "30")
    return folder


@pytest.fixture
def run(half_trained, tmp_path) -> Path:
    """A copy of the half-trained run, to be damaged."""
    shutil.copytree(half_trained / "run", tmp_path / "run")
    return tmp_path / "run"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def newest(run: Path, place: int = 0) -> Path:
    steps = sorted(read_index(run)["checkpoints"], key=lambda entry: -entry["step"])
    return run / "checkpoints" / steps[place]["path"]


@pytest.fixture
def refuse(refused, run, tmp_path):
    """Refuse to go on with the run, in this process if alone; return the one message."""

    def refuse(*flags: str, world_size: int = 1) -> str:
        command = ("train", str(run), "--resume", "--max-steps", "40", *flags)
        if world_size == 1:
            return refused(*command)
        return refusal(*command, world_size=world_size, folder=tmp_path / "outputs")

    return refuse


def attempt(run: Path) -> dict[str, Any]:
    """Return the `resume` record of a run that was gone on with once."""
    (found,) = (r for r in all_records(run) if r["event"] == "resume")
    return found


@pytest.mark.parametrize(
    ("damages", "on", "step"),
    [
        ([empty], 1, 28),
        ([Path.unlink], 2, 28),
        ([flip_a_bit], 2, 28),  # both ranks can read it, and have when rank 0 knows the hash
        ([truncate, flip_a_bit, Path.unlink], 1, 22),
    ],
)
def test_where_the_newest_are_damaged_an_older_whole_one_is_taken_and_the_user_is_told(
    uninterrupted, run, damages, on, step
):
    damaged = [newest(run, place) for place in range(len(damages))]
    for path, damage in zip(damaged, damages, strict=True):
        damage(path)
    printed = resumed(run, "--max-steps", str(STEPS), on=on)
    assert attempt(run)["step"] == step
    for path, problem in zip(damaged, attempt(run)["problems"], strict=True):
        assert str(path) in problem
        assert str(path) in printed
    assert f", step {step}" in printed
    assert_same_training(run, uninterrupted)
    for entry in read_index(run)["checkpoints"]:  # the damaged ones are no longer among them
        assert sha256(run / "checkpoints" / entry["path"]) == entry["sha256"]


def assert_nothing_overwritten(run: Path, before: dict[str, bytes]) -> None:
    after = files(run)
    for name, content in before.items():
        # The log may tell of the refusal, and the lock file says who held the run last.
        if name not in ("rank-0.log", "run.lock"):
            assert after[name] == content, name
    assert after.keys() - before.keys() <= {"rank-0.log", "rank-1.log"}


def test_where_all_are_damaged_resuming_is_refused_and_nothing_is_overwritten(run, refuse):
    for path in (run / "checkpoints").glob("*.pt"):
        flip_a_bit(path)
    before = files(run)
    assert str(run) in refuse()
    assert_nothing_overwritten(run, before)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"checkpoints": [1]}',
        b'{"checkpoints": [{"path": "a", "step": "x", "epoch": 0, "sha256": ""}]}',
    ],
)
def test_a_damaged_index_is_refused_and_nothing_is_overwritten(run, refuse, content):
    (run / "checkpoints" / "index.json").write_bytes(content)
    before = files(run)
    said = refuse()
    assert f"{run}/checkpoints/index.json" in said
    assert_nothing_overwritten(run, before)


def test_a_damaged_index_is_refused_alike_by_every_rank(run, refuse):
    (run / "checkpoints" / "index.json").write_text("{")
    refuse(world_size=2)


def test_a_missing_index_is_refused_where_checkpoints_were_announced(run, refuse):
    """Else the run would begin anew over them."""
    (run / "checkpoints" / "index.json").unlink()
    before = files(run)
    assert "index.json" in refuse()
    assert_nothing_overwritten(run, before)


class Malice:
    """Unpickling this runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def plant_pickle(path: Path, side_effect: Path, form: str) -> None:
    """Put code in a checkpoint's place, with the right hash in the index."""
    if form == "pickle":
        path.write_bytes(pickle.dumps(Malice(side_effect)))
    else:
        torch.save({**torch.load(path, weights_only=True), "model": Malice(side_effect)}, path)
    name_in_index(path)


def name_in_index(path: Path) -> None:
    index = read_index(path.parents[1])
    for entry in [*index["checkpoints"], index["last"], index["best"]]:
        if entry["path"] == path.name:
            entry["sha256"] = sha256(path)
    (path.parent / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_code_in_a_checkpoints_place_is_never_run(uninterrupted, run, tmp_path, form):
    trap = tmp_path / "trap"
    planted = newest(run)
    plant_pickle(planted, trap, form)
    with pytest.raises(FileNotFoundError):
        trap.rmdir()  # nothing has run so far
    printed = resumed(run, "--max-steps", str(STEPS))
    (problem,) = attempt(run)["problems"]
    assert str(planted) in problem
    assert str(planted) in printed
    assert_same_training(run, uninterrupted)
    assert not trap.exists()


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_code_in_the_place_of_every_checkpoint_is_refused(run, refuse, tmp_path, form):
    trap = tmp_path / "trap"
    for path in (run / "checkpoints").glob("*.pt"):
        plant_pickle(path, trap, form)
    assert str(run) in refuse()
    assert not trap.exists()


def test_the_trap_of_these_tests_does_spring_when_it_is_unpickled(tmp_path):
    pickle.loads(pickle.dumps(Malice(tmp_path / "trap")))
    assert (tmp_path / "trap").is_dir()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 no zip", b"\x80\x02."])
def test_a_file_that_is_no_checkpoint_is_named_though_its_hash_is_right(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(content)
    entry = Entry(path="a.pt", step=1, epoch=0, sha256=sha256(tmp_path / "a.pt"))
    with pytest.raises(UserError, match=r"a\.pt"):
        loading.load(tmp_path, entry)


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    torch.save({"format": 99, "model": {}}, tmp_path / "a.pt")
    entry = Entry(path="a.pt", step=1, epoch=0, sha256=sha256(tmp_path / "a.pt"))
    with pytest.raises(UserError, match=rf"format 99\b.*format {checkpoints.FORMAT}\b"):
        loading.load(tmp_path, entry)


def test_a_checkpoint_of_another_recipe_is_refused(run, refuse, half_trained, tmp_path):
    other = write_recipe(tmp_path, name="other.py")
    settings = run / "settings.toml"
    text = settings.read_text()
    assert str(half_trained / "tiny.py") in text
    settings.write_text(text.replace(str(half_trained / "tiny.py"), str(other)))
    before = files(run)
    said = refuse()
    assert "'tiny'" in said
    assert "'other'" in said
    assert_nothing_overwritten(run, before)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("hidden = 16", "hidden = 24", "hidden = 16"),
        ("samples = 131", "samples = 130", "samples = 131"),
        ("seed = 42", "seed = 43", "seed = 42"),
        ("batch_size = 12", "batch_size = 24", "batch_size = 12"),
    ],
)
def test_a_checkpoint_of_another_model_or_data_is_refused(run, refuse, old, new, named):
    settings = run / "settings.toml"
    text = settings.read_text()
    assert old in text
    settings.write_text(text.replace(old, new))
    before = files(run)
    said = refuse()
    assert named in said
    assert_nothing_overwritten(run, before)


def test_a_checkpoint_with_other_layers_is_refused(run, refuse, half_trained, tmp_path):
    """The recipe file was edited since, and that was allowed."""
    deeper = RECIPE.replace("nn.Tanh(),", "nn.Tanh(), nn.LayerNorm(options.hidden),")
    write_recipe(tmp_path, deeper)
    settings = run / "settings.toml"
    settings.write_text(
        settings.read_text().replace(str(half_trained / "tiny.py"), str(tmp_path / "tiny.py"))
    )
    said = refuse("--allow-change", "recipe")
    assert "3.weight" in said


def test_the_index_names_last_and_best_with_step_metric_and_hash(uninterrupted):
    index = read_index(uninterrupted)
    records = all_records(uninterrupted)
    told = [r for r in records if r["event"] == "checkpoint"]
    assert len(told) == 21  # every 4 of 66 steps and after 6 epochs, of which one is such a step
    for record, entry in zip(told, index["checkpoints"], strict=True):
        path = uninterrupted / record["path"]
        assert record["path"] == f"checkpoints/{entry['path']}"
        assert record["step"] == entry["step"]
        assert record["sha256"] == entry["sha256"] == sha256(path)
        assert torch.load(path, weights_only=True)["position"]["step"] == entry["step"]
    measured = {
        r["step"]: r["accuracy"]
        for r in records
        if r["event"] == "evaluation" and r["split"] == "validation"
    }
    assert {e["step"]: e["metric"] for e in index["checkpoints"] if e["metric"] is not None} == (
        measured
    )
    assert index["last"] == index["checkpoints"][-1]
    assert index["last"]["step"] == STEPS
    best = max(measured, key=lambda step: (measured[step], -step))
    assert (index["best"]["step"], index["best"]["metric"]) == (best, measured[best])
    assert index["best"] in index["checkpoints"]
    epochs = [e["path"] for e in index["checkpoints"] if "epoch" in e["path"]]
    assert epochs == [f"checkpoint_epoch_{number}.pt" for number in range(1, 7)]
    on_disk = {path.name for path in (uninterrupted / "checkpoints").glob("*.pt")}
    assert on_disk == {entry["path"] for entry in index["checkpoints"]}


@pytest.mark.parametrize(
    ("flags", "metric", "mode"),
    [
        (("--monitor", "loss"), "loss", "min"),
        (("--mode", "max"), "accuracy", "max"),
        (("--monitor", "loss", "--mode", "max"), "loss", "max"),
    ],
)
def test_only_the_last_and_the_best_k_by_the_monitored_metric_are_kept(
    tmp_path, flags, metric, mode
):
    run = tmp_path / "run"
    trained(write_recipe(tmp_path), run, "--keep-top-k", "2", *flags)
    records = all_records(run)
    measured = {
        r["epoch"]: r[metric]
        for r in records
        if r["event"] == "evaluation" and r["split"] == "validation"
    }
    sign = 1 if mode == "min" else -1
    best = sorted(measured, key=lambda epoch: (sign * measured[epoch], epoch))[:2]
    kept = {f"checkpoint_epoch_{epoch}.pt" for epoch in {*best, 6}}
    assert {path.name for path in (run / "checkpoints").glob("*.pt")} == kept
    index = read_index(run)
    assert {entry["path"] for entry in index["checkpoints"]} == kept
    assert index["best"]["path"] == f"checkpoint_epoch_{best[0]}.pt"
    assert (index["monitor"], index["mode"]) == (metric, mode)
    result = json.loads((run / "result.json").read_text())
    assert (result["best"]["epoch"], result["best"]["value"]) == (best[0], measured[best[0]])


def test_the_state_of_two_ranks_loads_into_the_plain_model(tmp_path):
    run, file = tmp_path / "run", write_recipe(tmp_path)
    trained(file, run, "--max-steps", "6", on=2)
    spec = importlib.util.spec_from_file_location("plain_tiny", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plain_tiny"] = module  # a dataclass looks its module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["plain_tiny"]
    model = module.recipe.model(module.Options()).double()
    model.load_state_dict(last_state(run)["model"], strict=True)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(last_state(run)["optimizer"])
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        (("--checkpoint-every-steps", "5"), [5, 10, 11, 15, 20, 22, 25]),
        (("--checkpoint-every-steps", "100"), [11, 22, 25]),
        (("--checkpoint-every-steps", "100", "--checkpoint-every-epochs", "2"), [22, 25]),
        (
            ("--checkpoint-every-steps", "100", "--checkpoint-every-minutes", "1e-9"),
            [*range(1, 26)],
        ),
        (("--checkpoint-every-steps", "100", "--checkpoint-every-minutes", "60"), [11, 22, 25]),
    ],
)
def test_checkpoints_come_by_steps_by_epochs_and_by_minutes_and_at_the_end(tmp_path, flags, steps):
    run = tmp_path / "run"
    trained(write_recipe(tmp_path), run, "--max-steps", "25", *flags)
    assert [e["step"] for e in read_index(run)["checkpoints"]] == steps


def test_the_minutes_to_a_checkpoint_count_from_the_one_before(monkeypatch):
    clock = itertools.count(0.0, 25.0)  # each look at the clock is 25 seconds after the last
    monkeypatch.setattr(stopping, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    minutes = stopping.SaveTimer(1.0)
    due = []
    for _ in range(7):
        due.append(minutes.passed())
        if due[-1]:
            minutes.restart()
    assert due == [False, False, True, False, False, True, False]


names = st.integers(0, 30).map(lambda step: f"checkpoint_step_{step}.pt")
metrics = st.none() | st.floats(-10, 10) | st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def entries(draw) -> Entry:
    return Entry(
        path=draw(names), step=draw(st.integers(0, 30)), epoch=0, sha256="0", metric=draw(metrics)
    )


@given(
    st.lists(entries(), max_size=20), st.none() | st.integers(1, 5), st.sampled_from(["min", "max"])
)
def test_pruning_keeps_the_last_and_the_best_k_and_nothing_else(added, top, mode):
    index = Index(mode=mode)
    for entry in added:
        index = index.add(entry)
        assert entry in index.checkpoints
    assert len({e.path for e in index.checkpoints}) == len(index.checkpoints)
    assert len({e.step for e in index.checkpoints}) == len(index.checkpoints)
    kept = index.prune(Retention(top_k=top))
    assert (kept.last, kept.best) == (index.last, index.best)
    assert kept.prune(Retention(top_k=top)) == kept
    if top is None:
        assert kept == index
        return
    scored = sorted(
        (e.metric for e in index.checkpoints if e.metric is not None), reverse=mode == "max"
    )
    left = [e.metric for e in kept.ranked()[:top]]
    assert left == scored[:top]
    assert len(kept.checkpoints) <= top + 1
    assert [e for e in index.checkpoints if e in kept.checkpoints] == list(kept.checkpoints)


@given(st.lists(entries(), min_size=1, max_size=8), st.sampled_from(["min", "max"]))
def test_an_index_is_read_back_as_it_was_written(added, mode):
    index = Index(monitor="loss", mode=mode)
    with tempfile.TemporaryDirectory() as folder:
        for entry in added:
            index = announce(Path(folder), index, entry, Retention())
        assert read_written(Path(folder)) == index


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["checkpoints", "monitor", "mode", "path", "step", "epoch", "sha256"]
                ),
                inner,
                max_size=7,
            )
        ),
        max_leaves=12,
    ).map(lambda tree: json.dumps(tree).encode())
)
def test_whatever_stands_in_the_index_it_is_read_or_refused_in_words(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "index.json").write_bytes(content)
        try:
            index = read_written(Path(folder))
        except UserError as error:
            assert "index.json" in str(error)  # noqa: PT017 - either outcome is right
        else:
            assert all(isinstance(entry.path, str) for entry in index.checkpoints)
            assert all(isinstance(entry.step, int) for entry in index.checkpoints)


def test_rules_by_number_and_age_keep_what_any_of_them_keeps_with_the_best(tmp_path):
    recipe = write_recipe(tmp_path, RECIPE.replace('"checkpoint_every_steps": 4,', ""))
    run = tmp_path / "run"
    trained(recipe, run, "--keep-newest", "2", "--monitor", "loss")
    index = read_index(run)
    best = index["best"]["path"]
    assert {e["path"] for e in index["checkpoints"]} == {
        *("checkpoint_epoch_5.pt", "checkpoint_epoch_6.pt"),
        best,
    }
    for number, entry in enumerate(index["checkpoints"]):  # all but the newest are a day old
        entry["time"] -= 86_400 * (number < len(index["checkpoints"]) - 1)
    (run / "checkpoints" / "index.json").write_text(json.dumps(index))
    settings = run / "settings.toml"
    settings.write_text(settings.read_text().replace("keep_newest = 2\n", ""))
    resumed(run, "--epochs", "8", "--keep-hours", "1")
    index = read_index(run)
    kept = {"checkpoint_epoch_6.pt", "checkpoint_epoch_7.pt", "checkpoint_epoch_8.pt"}
    assert {e["path"] for e in index["checkpoints"]} == kept | {index["best"]["path"]}
    assert {p.name for p in (run / "checkpoints").glob("*.pt")} == kept | {index["best"]["path"]}
