"""Checkpoints: what is in them, which are kept, and what happens when one is damaged."""

import itertools
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samestep import UserError
from samestep.base.run import checkpoints
from samestep.base.run.index import Entry
from samestep.base.run.index import read_index as read_written
from samestep.core.training import loop
from tests import tiny
from tests.command_line import refusal


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory) -> Path:
    """A run that stopped in its third epoch, with its recipe beside it."""
    folder = tmp_path_factory.mktemp("half")
    tiny.trained(tiny.write_recipe(folder), folder / "run", "--max-steps", "30")
    return folder


@pytest.fixture
def run(half_trained, tmp_path) -> Path:
    shutil.copytree(half_trained / "run", tmp_path / "run")
    return tmp_path / "run"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def newest(run: Path, place: int = 0) -> Path:
    steps = sorted(tiny.read_index(run)["checkpoints"], key=lambda entry: -entry["step"])
    return run / "checkpoints" / steps[place]["path"]


@pytest.fixture
def refuse(refused, run, tmp_path):
    """Refuse to resume the run, return the one message, and check that nothing is lost."""

    def refuse(*flags: str, world_size: int = 1) -> str:
        command = ("train", str(run), "--resume", "--max-steps", "40", *flags)
        before = tiny.files(run)
        if world_size == 1:
            said = refused(*command)
        else:
            said = refusal(*command, world_size=world_size, folder=tmp_path / "outputs")
        after = tiny.files(run)
        for name, content in before.items():
            # The log may tell of the refusal, and the lock file says who held the run last.
            if name not in ("rank-0.log", "run.lock"):
                assert after[name] == content, name
        assert after.keys() - before.keys() <= {"rank-0.log", "rank-1.log"}
        return said

    return refuse


def edit_settings(run: Path, old: str | Path, new: str | Path) -> None:
    file = run / "settings.toml"
    text = file.read_text()
    assert str(old) in text
    file.write_text(text.replace(str(old), str(new)))


def attempt(run: Path) -> dict[str, Any]:
    (found,) = (r for r in tiny.all_records(run) if r["event"] == "resume")
    return found


@pytest.mark.parametrize(
    ("damages", "on", "step", "lost"),
    [
        ([lambda path: path.write_bytes(b"")], 1, 28, None),
        ([truncate, flip_a_bit, Path.unlink], 1, 22, None),
        ([flip_a_bit], 1, 28, Path.unlink),  # the records tell of all, and have the hashes
        ([flip_a_bit], 2, 28, truncate),  # both ranks have read it when rank 0 knows the hash
    ],
)
def test_what_is_whole_is_taken(uninterrupted, run, damages, on, step, lost):
    damaged = [newest(run, place) for place in range(len(damages))]
    for path, damage in zip(damaged, damages, strict=True):
        damage(path)
    if lost:
        damaged.insert(0, run / "checkpoints" / "index.json")
        lost(damaged[0])
    printed = tiny.resumed(run, "--max-steps", str(tiny.STEPS), on=on)
    assert attempt(run)["step"] == step
    for path, problem in zip(damaged, attempt(run)["problems"], strict=True):
        assert str(path) in problem
        assert str(path) in printed
    assert f", step {step}" in printed
    tiny.assert_same_training(run, uninterrupted)
    for entry in tiny.read_index(run)["checkpoints"]:  # the damaged ones are no longer among them
        assert tiny.sha256(run / "checkpoints" / entry["path"]) == entry["sha256"]


def test_where_all_are_damaged_nothing_is_overwritten(run, refuse, tmp_path):
    paths = sorted((run / "checkpoints").glob("*.pt"))
    for number, path in enumerate(paths):
        if number % 2:
            flip_a_bit(path)
        else:
            plant_pickle(path, tmp_path / "trap", "torch")
    assert str(run) in refuse()
    assert not (tmp_path / "trap").exists()


class Malice:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def name_new_hash(path: Path) -> None:
    """Let the index name the hash that a changed checkpoint has."""
    index = tiny.read_index(path.parents[1])
    for entry in (*index["checkpoints"], index["last"], index["best"]):
        if entry["path"] == path.name:
            entry["sha256"] = tiny.sha256(path)
    path.with_name("index.json").write_text(json.dumps(index))


def plant_pickle(path: Path, side_effect: Path, form: str) -> None:
    """Put code in a checkpoint's place, with the right hash in the index."""
    if form == "pickle":
        path.write_bytes(pickle.dumps(Malice(side_effect)))
    else:
        torch.save({**torch.load(path, weights_only=True), "model": Malice(side_effect)}, path)
    name_new_hash(path)


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_code_in_a_checkpoints_place_is_never_run(uninterrupted, run, tmp_path, form):
    trap = tmp_path / "trap"
    planted = newest(run)
    plant_pickle(planted, trap, form)
    pickle.loads(pickle.dumps(Malice(tmp_path / "sprung")))
    assert (tmp_path / "sprung").is_dir(), "unpickling does spring the trap"
    printed = tiny.resumed(run, "--max-steps", str(tiny.STEPS))
    (problem,) = attempt(run)["problems"]
    assert str(planted) in problem
    assert "weights_only" not in problem, "PyTorch's advice would run it"
    assert str(planted) in printed
    tiny.assert_same_training(run, uninterrupted)
    assert not trap.exists()


def load(path: Path) -> None:
    checkpoints.load(path.parent, Entry(path=path.name, step=1, epoch=0, sha256=tiny.sha256(path)))


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 no zip", b"\x80\x02."])
def test_a_file_that_is_no_checkpoint_is_named_though_its_hash_is_right(tmp_path, content):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.pt"):
        load(tmp_path / "a.pt")


def change(path: Path, *changes: Callable[[dict[str, Any]], object]) -> None:
    content = torch.load(path, weights_only=True)
    for make in changes:
        make(content)
    torch.save(content, path)
    name_new_hash(path)


def test_a_checkpoint_of_a_newer_samestep_is_refused_not_passed_over(run, refuse):
    change(newest(run), lambda c: c.update(format=99))
    for on in (1, 2):
        said = refuse(world_size=on)
        assert re.search(rf"newer samestep.*format 99\b.*format {checkpoints.FORMAT}\b", said)


MISSING = [
    *("recipe", "classes", "model", "optimizer", "scaler", "schedule", "rng"),
    *("position", "loss_sums", "watch", "order"),
]


def test_a_whole_file_that_lacks_a_part_counts_as_damaged(run):
    steps = {entry["path"]: entry["step"] for entry in tiny.read_index(run)["checkpoints"]}
    path = newest(run)
    whole = path.read_bytes()
    for part in (*MISSING, "position/step", "optimizer/param_groups"):
        path.write_bytes(whole)
        *inside, last = part.split("/")
        change(path, lambda c, i=inside, n=last: (c[i[0]] if i else c).pop(n))
        entry = Entry(path=path.name, step=steps[path.name], epoch=0, sha256=tiny.sha256(path))
        with pytest.raises(UserError, match=rf"{path.name} .*{part.replace('/', '.')}"):
            checkpoints.load(path.parent, entry)
    tiny.resumed(run, "--max-steps", "31")
    assert str(path) in attempt(run)["problems"][0]
    assert attempt(run)["step"] == 28


def test_a_checkpoint_of_another_recipe_or_other_layers_is_refused(
    run, refuse, half_trained, tmp_path
):
    deeper = tiny.RECIPE.replace("nn.Tanh(),", "nn.Tanh(), nn.LayerNorm(options.hidden),")
    recipe = tiny.write_recipe(tmp_path, deeper)
    edit_settings(run, half_trained / "tiny.py", recipe)
    assert "3.weight" in refuse("--allow-change", "recipe")
    edit_settings(run, recipe, tiny.write_recipe(tmp_path, name="other.py"))
    said = refuse()
    assert "'tiny'" in said
    assert "'other'" in said


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
    edit_settings(run, old, new)
    assert named in refuse()


def validated(run: Path, metric: str) -> dict[int, float]:
    found = tiny.events(run, "evaluation")
    return {r["step"]: r[metric] for r in found if r["split"] == "validation"}


def test_the_index_names_last_and_best_and_the_state_loads_into_the_plain_model(uninterrupted):
    index, told = tiny.read_index(uninterrupted), tiny.events(uninterrupted, "checkpoint")
    assert len(told) == 21  # every 4 of 66 steps and after 6 epochs, of which one is such a step
    for record, entry in zip(told, index["checkpoints"], strict=True):
        path = uninterrupted / record["path"]
        assert record["path"] == f"checkpoints/{entry['path']}"
        assert record["step"] == entry["step"]
        assert record["sha256"] == entry["sha256"] == tiny.sha256(path)
        assert torch.load(path, weights_only=True)["position"]["step"] == entry["step"]
    measured = validated(uninterrupted, "accuracy")
    known = {e["step"]: e["metric"] for e in index["checkpoints"] if e["metric"] is not None}
    assert known == measured
    assert index["last"] == index["checkpoints"][-1]
    assert index["last"]["step"] == tiny.STEPS
    best = max(measured, key=lambda step: (measured[step], -step))
    assert (index["best"]["step"], index["best"]["metric"]) == (best, measured[best])
    assert index["best"] in index["checkpoints"]
    epochs = [e["path"] for e in index["checkpoints"] if "epoch" in e["path"]]
    assert epochs == [f"checkpoint_epoch_{number}.pt" for number in range(1, 7)]
    on_disk = {path.name for path in (uninterrupted / "checkpoints").glob("*.pt")}
    assert on_disk == {entry["path"] for entry in index["checkpoints"]}
    space: dict[str, Any] = {"__file__": str(uninterrupted.parent / "tiny.py")}
    exec(tiny.RECIPE, space)
    model = space["model"](space["Options"]()).double()
    model.load_state_dict(tiny.last_state(uninterrupted)["model"], strict=True)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(tiny.last_state(uninterrupted)["optimizer"])
    assert {int(state["step"]) for state in optimizer.state.values()} == {tiny.STEPS}


def test_only_the_last_and_the_best_k_by_the_monitored_metric_are_kept(tmp_path):
    run = tmp_path / "run"
    flags = ("--monitor", "loss", "--mode", "max")
    tiny.trained(tiny.write_recipe(tmp_path), run, "--keep-top-k", "2", *flags)
    measured = validated(run, "loss")
    best = sorted(measured, key=lambda step: (-measured[step], step))[:2]
    kept = {f"checkpoint_epoch_{step // tiny.STEPS_PER_EPOCH}.pt" for step in {*best, tiny.STEPS}}
    assert {path.name for path in (run / "checkpoints").glob("*.pt")} == kept
    index = tiny.read_index(run)
    assert {entry["path"] for entry in index["checkpoints"]} == kept
    assert index["best"]["step"] == best[0]
    assert (index["monitor"], index["mode"]) == ("loss", "max")
    result = json.loads((run / "result.json").read_text())
    assert result["best"]["value"] == measured[best[0]]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--checkpoint-every-steps 100 --checkpoint-every-minutes 1e-9", [*range(1, 26)]),
        ("--checkpoint-every-steps 100 --checkpoint-every-minutes 60", [11, 22, 25]),
    ],
)
def test_checkpoints_come_by_steps_by_epochs_and_by_minutes_and_at_the_end(tmp_path, flags, steps):
    run = tmp_path / "run"
    tiny.trained(tiny.write_recipe(tmp_path), run, "--max-steps", "25", *flags.split())
    assert [e["step"] for e in tiny.read_index(run)["checkpoints"]] == steps


def test_the_minutes_to_a_checkpoint_count_from_the_one_before(monkeypatch):
    clock = itertools.count(0.0, 25.0)  # each look at the clock is 25 seconds after the last
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    minutes, due = loop.SaveTimer(1.0), []
    for _ in range(7):
        due.append(minutes.passed())
        if due[-1]:
            minutes.restart()
    assert due == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"mode": 1}',
        b'{"checkpoints": [1]}',
        b'{"checkpoints": [{"path": "a", "step": "x", "epoch": 0, "sha256": ""}]}',
    ],
    ids=lambda content: content.decode(errors="replace")[:20],
)
def test_what_is_no_index_is_refused_in_words(tmp_path, content):
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(UserError, match=r"index\.json"):
        read_written(tmp_path)


def test_rules_by_number_and_age_keep_what_any_of_them_keeps_with_the_best(tmp_path):
    recipe = tiny.write_recipe(tmp_path, tiny.RECIPE.replace('"checkpoint_every_steps": 4,', ""))
    run = tmp_path / "run"
    tiny.trained(recipe, run, "--keep-newest", "2", "--monitor", "loss")
    index = tiny.read_index(run)
    newest_two = {"checkpoint_epoch_5.pt", "checkpoint_epoch_6.pt"}
    assert {e["path"] for e in index["checkpoints"]} == newest_two | {index["best"]["path"]}
    for number, entry in enumerate(index["checkpoints"]):  # all but the newest are a day old
        entry["time"] -= 86_400 * (number < len(index["checkpoints"]) - 1)
    (run / "checkpoints" / "index.json").write_text(json.dumps(index))
    edit_settings(run, "keep_newest = 2\n", "")
    tiny.resumed(run, "--epochs", "8", "--keep-hours", "1")
    index = tiny.read_index(run)
    kept = {"checkpoint_epoch_6.pt", "checkpoint_epoch_7.pt", "checkpoint_epoch_8.pt"}
    assert {e["path"] for e in index["checkpoints"]} == kept | {index["best"]["path"]}
    assert {p.name for p in (run / "checkpoints").glob("*.pt")} == kept | {index["best"]["path"]}
