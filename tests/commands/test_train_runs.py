"""What a run leaves in its directory, and how it is started, repeated and continued."""

import dataclasses
import re
import tomllib
import typing
from pathlib import Path

import pytest

from samestep import read_records
from samestep.commands.train import parse
from samestep.config import to_toml
from samestep.recipes.spiral import SpiralOptions
from samestep.settings import Settings
from samestep.training.plan import make_plan
from tests.command_line import RECIPE, read_json, run
from tests.idx_files import write_mnist

PLANTED = "hunter2-the-planted-secret"
SECRETS = {
    name: PLANTED
    for name in (
        *("WANDB_API_KEY", "COMET_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "PATH_TO_ME"),
        *("SLURM_JWT", "NCCL_TOKEN", "TORCH_SECRET", "PYTORCH_API_KEY", "SLURM_JOB_CREDENTIALS"),
    )
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory that holds a small recipe."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "small.py").write_text(RECIPE)
    return folder


def train(here: Path, *arguments: str, **more) -> str:
    """Run `samestep train` to its good end; return what rank 0 printed."""
    return run("train", *arguments, folder=here.parent / "outputs", **more).printed(0)


def records(path: Path, event: str) -> list[dict]:
    return [record for record in read_records(path) if record["event"] == event]


def losses(path: Path) -> list[float]:
    return [record["loss"] for record in records(path, "step")]


# --- what a run leaves


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_leaves_these_files_and_no_other(here, world_size):
    train(here, "small.py", "--run-dir", "run", world_size=world_size)
    left = {str(path.relative_to(here / "run")) for path in (here / "run").rglob("*")}
    checkpoints = {f"checkpoints/checkpoint_epoch_{n}.pt" for n in (1, 2)}
    logs = {f"rank-{rank}.log" for rank in range(1, world_size)}
    assert left == checkpoints | logs | {
        *("settings.toml", "environment.json", "events.jsonl", "result.json", "run.lock"),
        *("checkpoints", "checkpoints/index.json"),
    }


def test_the_default_directory_names_recipe_date_time_and_a_short_id(here):
    train(here, "small.py", world_size=2)
    train(here, "small.py")
    names = [path.name for path in (here / "runs").iterdir()]
    assert len(names) == 2, "both ranks use one directory, and the next run has its own"
    assert all(re.fullmatch(r"small-\d{8}-\d{6}-[0-9a-f]{4}", name) for name in names)


def test_the_result_says_how_the_run_ended(here):
    printed = train(here, "small.py", "--run-dir", "run", world_size=2)
    result = read_json(here / "run" / "result.json")
    assert {name: result[name] for name in (
        "recipe", "status", "reason", "world_size", "global_batch_size", "epochs", "steps",
        "device", "backend",
    )} == {
        "recipe": "small", "status": "completed", "reason": "finished", "world_size": 2,
        "global_batch_size": 20, "epochs": 2, "steps": 6, "device": "cpu", "backend": "gloo",
    }  # fmt: skip
    assert {"loss", "accuracy", "samples"} <= result["test"].keys()
    assert result["test"]["samples"] == 15
    assert result["best"].keys() == {"metric", "value", "epoch"}
    evaluated = [r["accuracy"] for r in records(here / "run", "evaluation")
                 if r["split"] == "validation"]  # fmt: skip
    assert result["best"]["value"] == max(evaluated)
    assert result["best"]["epoch"] == 1 + evaluated.index(max(evaluated))
    assert {"samestep", "torch", "python"} <= result["versions"].keys()
    assert f"{result['test']['accuracy']:.4f}" in printed


def test_the_times_of_a_run_are_plausible(here):
    train(here, "small.py", "--run-dir", "run")
    result = read_json(here / "run" / "result.json")
    assert 0 < result["training_seconds"] < result["seconds_to_first_step"] + 30
    assert 0 < result["seconds_to_first_step"] < 60
    assert result["samples_per_s"] == pytest.approx(120 / result["training_seconds"], rel=1e-6)
    steps = records(here / "run", "step")
    assert all(a["seconds"] < b["seconds"] for a, b in zip(steps, steps[1:], strict=False))


EVENTS = {
    "start": {"recipe", "world_size", "global_batch_size", "batch_size", "accumulate", "lr"},
    "step": {"step", "epoch", "loss", "grad_norm", "lr", "samples", "seconds", "samples_per_s"},
    "evaluation": {"split", "epoch", "loss", "accuracy", "samples"},
    "checkpoint": {"step", "path", "sha256"},
    "stop": {"reason", "step"},
}


def test_every_record_names_its_event_first_and_has_its_fields(here):
    train(here, "small.py", "--run-dir", "run", "--log-every", "1")
    lines = (here / "run" / "events.jsonl").read_text().splitlines()
    assert all(line.startswith('{"event": "') for line in lines)
    assert not any("NaN" in line or "Infinity" in line for line in lines)
    found = list(read_records(here / "run"))
    assert found[0]["event"] == "start"
    assert found[-1] | {"step": 12, "reason": "finished"} == found[-1]
    for event, names in EVENTS.items():
        of_event = [record for record in found if record["event"] == event]
        assert of_event, event
        assert all(names <= record.keys() for record in of_event), event


@pytest.mark.parametrize(
    ("log_every", "logged"), [(1, list(range(1, 13))), (5, [5, 10]), (50, [])]
)
def test_a_step_is_recorded_at_each_interval_with_the_samples_so_far(here, log_every, logged):
    train(here, "small.py", "--run-dir", "run", "--log-every", str(log_every))
    steps = records(here / "run", "step")
    assert [record["step"] for record in steps] == logged
    assert [record["samples"] for record in steps] == [10 * step for step in logged]
    assert [record["epoch"] for record in steps] == [1 + (step - 1) // 6 for step in logged]


def test_checkpoint_records_and_the_index_give_the_hash_of_each_file(here):
    import hashlib

    train(here, "small.py", "--run-dir", "run")
    announced = {record["path"]: record["sha256"] for record in records(here / "run", "checkpoint")}
    assert len(announced) == 2
    for path, sha256 in announced.items():
        assert hashlib.sha256((here / "run" / path).read_bytes()).hexdigest() == sha256
    index = read_json(here / "run" / "checkpoints" / "index.json")
    assert {f"checkpoints/{e['path']}": e["sha256"] for e in index["checkpoints"]} == announced
    assert index["last"]["path"] == "checkpoint_epoch_2.pt"
    assert index["best"]["metric"] == max(e["metric"] for e in index["checkpoints"])


def test_the_environment_is_recorded_by_an_allow_list_without_secrets(here):
    wanted = {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID_OF_ME": "17", "TORCH_LOGS": "-all"}
    train(here, "small.py", "--run-dir", "run", world_size=2,
          environment={**SECRETS, **wanted, "HOME_OF_ME": "elsewhere"})  # fmt: skip
    recorded = read_json(here / "run" / "environment.json")
    assert recorded["world_size"] == 2
    assert recorded["launcher"] == "torchrun"
    assert {"torch", "python", "samestep"} <= recorded["versions"].keys()
    variables = recorded["variables"]
    assert wanted.items() <= variables.items()
    assert {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= variables.keys()
    assert not {"HOME_OF_ME", "PATH", "HOME"} & variables.keys()
    for path in (here / "run").rglob("*"):
        assert path.is_dir() or PLANTED.encode() not in path.read_bytes(), path


# --- rank 0 alone prints and writes


def test_what_another_rank_prints_goes_to_its_log(here):
    loud = 'import os, sys\nprint("import on", os.environ["RANK"])\n' + RECIPE.replace(
        "    return nn", '    print("model on", os.environ["RANK"], file=sys.stderr)\n    return nn'
    )
    (here / "loud.py").write_text(loud)
    ranks = run("train", "loud.py", "--run-dir", "run", world_size=2, folder=here.parent / "out")
    assert ranks.printed(1) == ""
    assert "import on 0\nmodel on 0\n" in ranks.printed(0)
    assert " on 1" not in ranks.printed(0)
    log = (here / "run" / "rank-1.log").read_text()
    assert sorted(log.splitlines()) == ["import on 1", "model on 1"]


WATCHED = """
import builtins, os, sys
from pathlib import Path

log = Path(os.environ["OPENED"]) / os.environ["RANK"]

def note(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
    if writes or event in ("os.mkdir", "os.rename", "os.remove"):
        with_fd = os.open(log, os.O_RDONLY | os.O_CREAT)  # read-only for the hook: no recursion
        os.close(with_fd)
        seen.append(str(arguments[0]))

seen = []
sys.addaudithook(note)

import atexit, json
atexit.register(lambda: None)
""" + RECIPE.replace(
    "    return nn.Linear(4, 2)",
    "    return nn.Linear(4, 2)\n\n"
    "def loss(outputs, targets):\n"
    "    mine = list(seen)\n"
    "    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)\n"
    "    os.write(descriptor, json.dumps(mine).encode())\n"
    "    os.close(descriptor)\n"
    "    del seen[len(mine):]\n"
    "    return nn.functional.cross_entropy(outputs, targets)\n",
).replace("recipe = Recipe(", "recipe = Recipe(loss=loss, ")
