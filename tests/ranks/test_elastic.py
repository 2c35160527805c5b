"""Ranks that outlive each other: real processes, real kills, and the bits of an undisturbed run."""

import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.base.errors import UserError
from samestep.base.run.records import read_records
from samestep.base.settings import Settings
from samestep.core.session.notes import asks_for_ranks
from samestep.launch.ranks import keeper, nproc
from samestep.launch.ranks.keeper import Elastic, Keeper, elastic_of
from samestep.launch.ranks.regroup import Group, Keys
from tests.command_line import typed

# A rank of it kills itself where DEATHS says so: member → place and step.
RECIPE = """
import json, os, signal, time
import torch
from torch import nn
from samestep import Recipe, Splits
from samestep.core.session import training_run

PLACE, STEP = json.loads(os.environ["DEATHS"]).get(os.environ.get("SAMESTEP_MEMBER"), ("", 0))
at = 0
def die(place):
    if place == PLACE and at == STEP:
        time.sleep(HANG)
        os.kill(os.getpid(), signal.SIGKILL)
class Model(nn.Linear):
    def get_extra_state(self):
        die("checkpoint")
        return torch.zeros(1)
    def set_extra_state(self, state): pass
def data():
    die("data")
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(7))
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:60], y[:60]), validation=(x[60:75], y[60:75]), test=(x[75:], y[75:]))
def loss(outputs, targets, step):
    global at
    at = step
    time.sleep(PAUSE)
    die("step")
    return nn.functional.cross_entropy(outputs, targets)
def accuracy(outputs, targets):
    die("evaluation")
    return (outputs.argmax(dim=1) == targets).float()

def seen(it): it["event"] == "start" and os.makedirs(f"{__file__}.{os.getpid()}", exist_ok=True)
describe = training_run.describe
training_run.describe = lambda *given: (describe(*given), die("description"))

recipe = Recipe(model=lambda: Model(4, 2), data=data, loss=loss, metrics={"accuracy": accuracy},
    on_record=seen, settings={"epochs": 4, "batch_size": 12, "log_every": 1, "device": "cpu"})
"""


def recipe(pause: float = 0.0, hang: float = 0.0) -> str:
    return RECIPE.replace("PAUSE", str(pause)).replace("HANG", str(hang))


def train(folder: Path, *flags: str, deaths: dict[int, tuple[str, int]], nproc="3", **times: float):
    """Train on ranks that die as told; return how the command ended, and the run."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.py"
    file.write_text(recipe(**times))
    command = ("-m", "samestep", "train", file, "--oversubscribe", "--nproc", nproc, *flags)
    told = {"DEATHS": json.dumps(deaths)}
    ended = typed(*command, "--run-dir", folder / "run", folder=folder, **told)
    return ended, folder / "run"


def undisturbed(folder: Path, monkeypatch, **settings) -> Path:
    monkeypatch.setenv("DEATHS", "{}")
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(recipe())
    run = samestep.train(folder / "recipe.py", run_dir=folder / "run", quiet=True, **settings)
    return run.path


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def records(run: Path, *kinds: str) -> list[dict]:
    return [record for record in read_records(run) if record["event"] in kinds]


def test_the_others_take_the_same_next_step_and_end_with_the_same_bits(tmp_path, monkeypatch):
    flags = ("--elastic", "--no-elastic-replace", "--virtual-ranks", "3")
    deaths = {0: ("step", 7), 1: ("evaluation", 14)}
    ended, run = train(tmp_path / "killed", *flags, deaths=deaths)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    whole = undisturbed(tmp_path / "whole", monkeypatch, virtual_ranks=3)
    assert result(run)["weights_sha256"] == result(whole)["weights_sha256"]
    told = records(run, "regroup")
    sizes = [(one["step"], one["ranks_before"], one["world_size"]) for one in told]
    assert sizes == [(7, 3, 2), (15, 2, 1)]
    assert "rank 0 was killed by SIGKILL" in told[0]["gone"][0]
    assert result(run)["regroups"] == 2
    assert len([*run.parent.glob("recipe.py.*")]) == 3
    for kind, number in {"step": 20, "epoch": 4, "evaluation": 5}.items():
        found = records(run, kind)
        assert len(found) == number, (kind, found)
        pairs = zip(found, records(whole, kind), strict=True)
        assert all(mine["loss"] == its["loss"] for mine, its in pairs), kind
    assert "rank 0 was killed by SIGKILL (out of memory?): 2 ranks from step 8 on" in ended.stdout


@pytest.mark.slow
def test_a_new_rank_joins_and_what_nobody_holds_any_more_comes_from_the_newest_checkpoint(
    tmp_path, monkeypatch
):
    ended, run = train(
        tmp_path / "killed",
        *("--elastic", "--virtual-ranks", "3", "--epochs", "60", "--checkpoint-every-epochs", "1"),
        "--resume",  # a newcomer then finds a run, whose settings have more filled in
        deaths={0: ("checkpoint", 9), 2: ("step", 3), 3: ("step", 250)},
        pause=0.05,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    whole = undisturbed(tmp_path / "whole", monkeypatch, virtual_ranks=3, epochs=60)
    assert result(run)["weights_sha256"] == result(whole)["weights_sha256"]
    sizes = [one["world_size"] for one in records(run, "regroup")]
    assert sizes[:2] == [2, 1]
    assert max(sizes[2:]) > 1
    times = Counter((one["event"], one["step"]) for one in records(run, "step", "epoch"))
    assert set(times.values()) == {1}
    assert len(times) == 300 + 60


@pytest.mark.slow
def test_all_ranks_may_die_and_their_successors_too_before_they_can_join(tmp_path):
    deaths = {**dict.fromkeys((0, 1), ("step", 7)), **dict.fromkeys((2, 3), ("data", 0))}
    early = {0: ("description", 0)}
    for name, those in {"all": deaths, "one before the first record": early}.items():
        ended, run = train(tmp_path / name, "--elastic", deaths=those, nproc="2")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert result(run)["steps"] == 20
    limit = ("--elastic", "--elastic-limit", "3")
    ended, _ = train(tmp_path / "limit", *limit, deaths=deaths, nproc="2")
    assert ended.returncode == 1
    assert "before it could join: that is number 4 within an hour" in ended.stderr


@pytest.mark.slow
def test_without_virtual_ranks_the_weights_differ_by_rounding_alone(tmp_path, monkeypatch):
    flags = ("--elastic", "--no-elastic-replace", "--precision", "fp64")
    # Of five, some wait for ranks that live, and have to be told.
    ended, run = train(tmp_path / "killed", *flags, deaths={1: ("step", 7)}, nproc="5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    whole = undisturbed(tmp_path / "whole", monkeypatch, precision="fp64")
    mine, its = (samestep.load(path).state_dict() for path in (run, whole))
    assert all((mine[name] - its[name]).abs().max() < 1e-10 for name in ("weight", "bias"))
    losses = [[one["loss"] for one in records(path, "epoch")] for path in (run, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_and_the_others_continue(tmp_path):
    flags = ("--elastic", "--no-elastic-replace", "--stall-s", "3")
    ended, run = train(tmp_path, *flags, deaths={1: ("step", 7)}, hang=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (told,) = records(run, "regroup")
    assert (told["step"], told["world_size"]) == (7, 2)
    assert told["gone"][0].startswith("rank 1 hung: ")
    assert "recipe.py:" in told["gone"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("2:3", "--no-elastic-replace"), "1 of 2 ranks are left, but --elastic needs at least 2"),
        (("--elastic-limit", "1"), "number 2 within an hour, and --elastic-limit is 1."),
    ],
)
def test_a_run_ends_with_one_message_where_too_few_are_left_or_too_many_die(tmp_path, flags, says):
    deaths = {0: ("step", 3), 2: ("step", 5)}
    ended, run = train(tmp_path, "--elastic", *flags, deaths=deaths)
    assert ended.returncode == 1
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert records(run, "regroup")[0]["world_size"] == 2


@pytest.mark.parametrize(
    ("wanted", "settings", "says"),
    [
        ("0:2", {}, "MIN:MAX"),
        ("3:4", {}, "starts with 2 ranks"),
        ("yes", {}, "MIN:MAX"),
        ("auto", {"engine": "lightning"}, "--engine native"),
        ("auto", {"batch_size_per_rank": 4}, "use --batch-size"),
    ],
)
def test_bounds_and_settings_that_do_not_go_with_it_are_refused_by_name(wanted, settings, says):
    with pytest.raises(UserError, match=says):
        elastic_of(wanted, 2, Settings(**settings))


def test_flags_without_it_are_refused_and_data_that_asks_for_ranks_is_told():
    with pytest.raises(UserError, match="elastic=True"):
        samestep.train("spiral", nproc=2, elastic_limit=3, quiet=True)

    def of_a_rank():
        return [torch.arange(8)[dist.get_rank() :: int(os.environ["WORLD_SIZE"])] for _ in "ab"]

    assert asks_for_ranks(of_a_rank).startswith("get_rank, WORLD_SIZE (test_elastic.py:")
    assert not asks_for_ranks(undisturbed)


@pytest.mark.parametrize("wanted", [1, "auto"])
def test_one_rank_alone_cannot_outlive_another_and_says_so(wanted, monkeypatch):
    monkeypatch.setattr(nproc, "ranks_to_start", lambda *_, **__: 1)
    with pytest.raises(UserError, match="--elastic needs several ranks"):
        nproc.start_nproc(wanted, [], elastic=lambda _: None)


def test_a_clock_that_is_set_back_lets_no_group_wait(tmp_path, monkeypatch):
    wall, passed = [1e9], [0.0]
    clock = SimpleNamespace(time=lambda: wall[0], monotonic=lambda: passed[0])
    monkeypatch.setattr(keeper, "time", clock)
    kept = Keeper([], tmp_path, Elastic(most=2), None, lambda: None)
    kept.store = dist.HashStore()
    kept.store.set(Keys(0).lost, "1")
    kept._answer()
    wall[0], passed[0] = 1e6, 10.0
    kept._answer()
    assert kept.group.number == 1
    assert kept.group.began == 1e6 - 10


def test_too_few_ranks_are_no_group_though_rank_0_asked_for_one_before_it_died(tmp_path):
    kept = Keeper([], tmp_path, Elastic(least=2, most=2), None, lambda: None)
    kept.store, kept.group = dist.HashStore(), Group(number=1, members=(0, 1))
    kept.store.set(Keys(1).wish, "1")
    kept._awaited = (1.0, ["rank 0 was killed", "rank 1 was killed"])
    kept._answer()
    assert kept.group.number == 1, "a group without ranks would never be followed by another"
