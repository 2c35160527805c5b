"""What a run leaves in its directory, and how it is started, repeated and continued."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from samestep import read_records
from samestep.base.settings import Settings
from samestep.core.data.order import TokenCut
from samestep.core.plan import make_plan
from samestep.core.recipes.spiral import SpiralOptions
from samestep.core.session.request import to_toml
from samestep.shell.commands.train import parse
from tests.command_line import RECIPE, files_written, read_json, train_here
from tests.idx_files import write_mnist
from tests.processes import run_ranks
from tests.tiny import files

pytestmark = pytest.mark.xdist_group("train-runs")  # the runs are trained once for all of them

PLANTED = "hunter2-the-planted-secret"
SECRETS = {
    **dict.fromkeys(("WANDB_API_KEY", "COMET_API_KEY", "AWS_SECRET_ACCESS_KEY"), PLANTED),
    **dict.fromkeys(("MY_PASSWORD", "PATH_TO_ME", "SLURM_JWT", "SLURM_JOB_CREDENTIALS"), PLANTED),
    **dict.fromkeys(("NCCL_TOKEN", "TORCH_SECRET", "PYTORCH_API_KEY"), PLANTED),
}


@pytest.fixture
def here(here) -> Path:
    (here / "small.py").write_text(RECIPE)
    return here


def records(path: Path, event: str) -> list[dict]:
    return [record for record in read_records(path) if record["event"] == event]


def saved_settings(path: Path) -> dict:
    return tomllib.loads((path / "settings.toml").read_text())


def losses(path: Path) -> list[float]:
    return [record["loss"] for record in records(path, "step")]


@dataclass(frozen=True)
class Finished:
    path: Path
    recipe: Path
    printed: list[str]  # by each rank
    written: list[set[Path]]  # what each rank opened for writing, or renamed


WANTED = {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID_OF_ME": "17", "TORCH_LOGS": "-all"}
# On several ranks each says that it has read the recipe, and that it builds the model.
LOUD = 'import os, sys\nrank = os.environ.get("RANK")\nif rank: print("import on", rank)\n'
LOUD += RECIPE.replace(
    "    return nn", '    if rank: print("model on", rank, file=sys.stderr)\n    return nn'
)


def watched_training(arguments: list[str], variables: dict[str, str]) -> set[Path]:
    os.environ.update(variables)
    return files_written(["train", *arguments])


def _finish(folder: Path, *flags: str, world_size: int = 1, **variables: str) -> Finished:
    here, outputs = folder / "here", folder / "outputs"
    here.mkdir()
    (here / "small.py").write_text(LOUD)
    with contextlib.chdir(here):
        arguments = ["small.py", *flags]
        written = run_ranks(watched_training, world_size, outputs, arguments, variables)
    printed = [(outputs / f"output-{rank}.txt").read_text() for rank in range(world_size)]
    (path,) = (here / "runs").iterdir()
    return Finished(path, here / "small.py", printed, written)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Finished:
    """On one rank, and so short that every step is recorded."""
    stale = {"SAMESTEP_STARTED_AT": "1.0"}  # left by another command: it does not count
    return _finish(tmp_path_factory.mktemp("alone"), **stale)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory) -> Finished:
    """On two ranks, with secrets in their environment, and no step recorded."""
    variables = {**SECRETS, **WANTED, "HOME_OF_ME": "elsewhere"}
    folder = tmp_path_factory.mktemp("together")
    return _finish(folder, "--log-every", "50", world_size=2, **variables)


@pytest.fixture(params=["alone", "of_two_ranks"])
def finished(request) -> Finished:
    return request.getfixturevalue(request.param)


def test_a_run_leaves_these_files_and_no_other(finished):
    left = {str(path.relative_to(finished.path)) for path in finished.path.rglob("*")}
    world_size = read_json(finished.path / "result.json")["world_size"]
    checkpoints = {f"checkpoints/checkpoint_epoch_{n}.pt" for n in (1, 2)}
    logs = {f"rank-{rank}.log" for rank in range(1, world_size)}
    assert left == checkpoints | logs | {
        *("settings.toml", "environment.json", "events.jsonl", "result.json", "run.lock"),
        *("recipe.py", "summary.json"),
        *("checkpoints", "checkpoints/index.json"),
    }


def test_the_result_says_how_the_run_ended_and_the_environment_no_secret(of_two_ranks):
    result = read_json(of_two_ranks.path / "result.json")
    expected = {"recipe": "small", "status": "completed", "reason": "finished", "device": "cpu"}
    expected |= {"world_size": 2, "global_batch_size": 10, "epochs": 2, "steps": 12}
    expected |= {"backend": "gloo"}
    assert expected.items() <= result.items()
    assert {"loss", "accuracy", "samples"} <= result["test"].keys()
    assert result["test"]["samples"] == 15
    assert result["best"].keys() == {"metric", "mode", "value", "epoch"}
    found = records(of_two_ranks.path, "evaluation")
    evaluated = [r["accuracy"] for r in found if r["split"] == "validation"]
    assert result["best"]["value"] == max(evaluated)
    assert result["best"]["epoch"] == 1 + evaluated.index(max(evaluated))
    assert {"samestep", "torch", "python"} <= result["versions"].keys()
    assert f"{result['test']['accuracy']:.4f}" in of_two_ranks.printed[0]
    recorded = read_json(of_two_ranks.path / "environment.json")
    assert recorded["world_size"] == 2
    assert recorded["launcher"] == "torchrun"
    assert {"torch", "python", "samestep"} <= recorded["versions"].keys()
    variables = recorded["variables"]
    assert WANTED.items() <= variables.items()
    assert {"RANK", "WORLD_SIZE", "MASTER_PORT"} <= variables.keys()
    assert not {"HOME_OF_ME", "PATH", "HOME"} & variables.keys()
    for path in of_two_ranks.path.rglob("*"):
        assert path.is_dir() or PLANTED.encode() not in path.read_bytes(), path


def test_times_are_plausible_and_every_record_has_its_fields(alone, of_two_ranks):
    result = read_json(alone.path / "result.json")
    for name in ("training_seconds", "seconds_to_first_step"):
        assert 0 < result[name] < 3600, name  # on however busy a machine
    assert result["samples_per_s"] == pytest.approx(120 / result["training_seconds"], rel=1e-6)
    steps = records(alone.path, "step")
    assert records(of_two_ranks.path, "step") == [], "its interval is longer than the run"
    assert [(r["step"], r["samples"], r["epoch"]) for r in steps] == [
        (step, 10 * step, 1 + (step - 1) // 6) for step in range(1, 13)
    ]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(steps))
    lines = (alone.path / "events.jsonl").read_text().splitlines()
    assert all(line.startswith('{"event": "') for line in lines)
    assert not any("NaN" in line or "Infinity" in line for line in lines)
    found = list(read_records(alone.path))
    assert found[0]["event"] == "start"
    assert found[-1] | {"step": 12, "reason": "finished"} == found[-1]
    for event, names in EVENTS.items():
        of_event = [record for record in found if record["event"] == event]
        assert of_event, event
        assert all({*names.split()} <= record.keys() for record in of_event), event


EVENTS = {
    "start": "recipe world_size global_batch_size micro_batch_size accumulate lr",
    "step": "step epoch loss grad_norm lr samples seconds samples_per_s",
    "epoch": "epoch step loss samples train_seconds samples_per_s phases",
    "evaluation": "split epoch loss accuracy samples seconds",
    "checkpoint": "step path sha256 seconds",
    "stop": "reason step",
}


def test_another_rank_writes_nothing_but_its_log_in_the_one_default_directory(of_two_ranks):
    of_main, of_other = of_two_ranks.printed
    assert of_other == ""
    assert "import on 0\nmodel on 0\n" in of_main
    assert " on 1" not in of_main
    log = (of_two_ranks.path / "rank-1.log").read_text()
    assert sorted(log.splitlines()) == ["import on 1", "model on 1"]
    assert re.fullmatch(r"small-\d{8}-\d{6}-[0-9a-f]{4}", of_two_ranks.path.name)
    here = of_two_ranks.recipe.parent
    in_run = [
        {path.name for path in paths if here in path.parents} for paths in of_two_ranks.written
    ]
    assert {"events.jsonl", ".settings.toml.tmp", ".result.json.tmp"} <= in_run[0]
    assert in_run[1] == {"rank-1.log"}


# Another value than the default of each, as TOML has it.
SETTINGS = tomllib.loads(
    """
run_dir="elsewhere" epochs=7 max_steps=9 batch_size=16 batch_size_per_rank=24 micro_batch_size=3
accumulate=2 self_check=false virtual_ranks=4 drop_last=true shuffle_buffer=64
order="columns" group_by_length=true batch_tokens=512
optimizer="adamw" lr=0.25 momentum=0.5 eval_batch_size=7 weight_decay=0.125 lr_scaling="sqrt"
base_batch_size=8 warmup_steps=3 warmup_from=0.5 schedule="polynomial" lr_end=0.125
lr_power=0.5 clip_norm=0.75 ema=0.25
precision="bf16" param_dtype="bf16" matmul_precision="high" newton_schulz="fp32" seed=7
init_from="/w.safetensors" init_strict=false device="cpu" backend="gloo" timeout_s=77.0
stall_s=33.0 bucket_cap_mb=3 oversubscribe=true compile="on" threads=2
num_workers=1 log_every=4
eval_every_epochs=3 eval_every_steps=11 checkpoint_every_epochs=5 checkpoint_every_steps=6
checkpoint_every_minutes=0.5 checkpoint_sync=true
keep_newest=3 keep_hours=2.5 strategy="fsdp" shard_within="node" reshard_after_forward=false
gather_dtype="bf16" cpu_offload=true
keep_top_k=2 monitor="loss" mode="max" patience=4 min_delta=0.0625
stop_monitor="loss:min" halving=3 mirror="file:///x"
pictures=false channels_last=true cudnn_benchmark=true deterministic=true find_unused=true
checkpoint_activations=true static_graph=true sync_batchnorm=true engine="lightning"
track="tensorboard" track_project="spirals" track_name="one" track_workspace="us" track_tags="a,b"
track_offline=true track_checkpoints=true track_timeout=9.0
""".replace(" ", "\n")
)
OPTIONS = {"num_samples": 1001, "noise": 0.5, "data_seed": 3, "hidden_dims": (8, 4)}
OPTIONS |= {"dropout": 0.25}
# Where the run lies is not written into it; what follows from the batch sizes neither.
NOT_IN_FILE = {"run_dir", "accumulate", "batch_size_per_rank"}


def as_flags(table: dict) -> list[str]:
    flags = []
    for name, value in table.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def write_toml(path: Path, table: dict) -> str:
    def text(value: object) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return str(list(value)) if isinstance(value, tuple) else repr(value)

    path.write_text("".join(f"{name} = {text(value)}\n" for name, value in table.items()))
    return str(path)


def resolved(flags: list[str]) -> dict:
    _, request = parse(["spiral", *flags])
    cut = TokenCut((100,) * 70, 1) if request.settings.batch_tokens else None
    plan = make_plan(request.settings, 7000, 1, by_tokens=cut)
    sizes = {"batch_size": plan.global_batch_size, "micro_batch_size": plan.micro_batch_size}
    saved = tomllib.loads(to_toml(request, plan))
    saved |= saved.pop("options")
    values = {**dataclasses.asdict(request.settings), **dataclasses.asdict(request.options)}
    for name in set(saved) - {"recipe", *sizes}:
        assert saved[name] == (list(v) if isinstance(v := values[name], tuple) else v)
    assert saved.keys() >= {k for k, v in values.items() if v is not None} - NOT_IN_FILE
    return values


def test_the_examples_here_cover_every_setting_and_option():
    assert SETTINGS.keys() == {field.name for field in dataclasses.fields(Settings)}
    assert OPTIONS.keys() == {field.name for field in dataclasses.fields(SpiralOptions)}
    defaults = {**vars(Settings()), **vars(SpiralOptions())}
    same = [name for name, value in (SETTINGS | OPTIONS).items() if defaults[name] == value]
    assert not same


# What does not go with the others, apart.
APART = [
    *({name} for name in ("virtual_ranks", "accumulate", "max_steps", "momentum", "engine")),
    *({name} for name in ("deterministic", "group_by_length", "batch_tokens")),
    {"batch_size_per_rank", "micro_batch_size"},
    {
        *("strategy", "shard_within", "reshard_after_forward", "cpu_offload", "gather_dtype"),
        *("precision", "param_dtype"),
    },
]


@pytest.mark.parametrize("names", [{*SETTINGS, *OPTIONS}.difference(*APART), *APART], ids=min)
def test_settings_come_from_a_toml_file_or_from_flags_which_win_and_are_saved(here, names):
    values = SETTINGS | OPTIONS | {"optimizer": "sgd" if "momentum" in names else "adamw"}
    table = {name: values[name] for name in names | {"optimizer"}}
    config = write_toml(here / "my.toml", table)
    by_flag = resolved(as_flags(table))
    assert by_flag == resolved(["--config", config])
    assert {key: by_flag[key] for key in table} == table
    defaults = {**vars(Settings()), **vars(SpiralOptions())}
    needed = {"strategy", "precision"}  # by others
    wanted = {n: defaults[n] for n in names - needed if defaults[n] not in (None, "")}
    found = resolved(["--config", config, *as_flags(wanted)])
    assert {name: found[name] for name in wanted} == wanted


def test_a_layer_of_settings_beats_those_below_and_replaces_what_excludes_its_own(here):
    assert Settings().epochs is None
    assert resolved([])["epochs"] == 30
    config = write_toml(here / "my.toml", {"epochs": 4})
    assert resolved(["--config", config])["epochs"] == 4
    assert resolved(["--config", config, "--epochs", "5"])["epochs"] == 5
    assert resolved(["--epochs=5", f"--config={config}"])["epochs"] == 5
    config = write_toml(here / "my.toml", {"global_batch_size": 10, "accumulate": 4})
    values = resolved(["--config", config])
    assert (values["batch_size"], values["accumulate"]) == (10, 4)
    values = resolved(["--config", config, "--global-batch-size", "70", "--micro-batch-size", "9"])
    assert (values["batch_size"], values["accumulate"]) == (70, None)
    values = resolved(["--config", config, "--batch-size-per-rank", "7"])
    assert (values["batch_size"], values["batch_size_per_rank"]) == (None, 7)
    assert resolved(["--max-steps", "5"])["epochs"] is None


def test_a_run_starts_another_one_from_its_settings(here):
    flags = "--lr 0.125 --seed 5 --log-every 1 --accumulate 3 --batch-size 8"
    train_here("small.py", "--run-dir", "first", *flags.split())
    train_here("first")
    (second,) = (here / "runs").iterdir()
    plans = [records(path, "start")[0] for path in (here / "first", second)]
    for name in ("global_batch_size", "micro_batch_size", "accumulate"):
        assert plans[0][name] == plans[1][name]
    assert losses(here / "first") == losses(second)
    assert saved_settings(second) == saved_settings(here / "first")
    train_here("first", "--run-dir", "third", "--lr", "0.25")
    assert losses(here / "third") != losses(second)


def test_one_command_begins_a_run_and_repeated_goes_on_with_it_and_keeps_its_result(here):
    command = ["small.py", "--run-dir", "run", "--resume"]
    train_here(*command)
    assert records(here / "run", "resume") == []
    before = read_json(here / "run" / "result.json")
    checkpoints = files(here / "run" / "checkpoints")
    assert "checkpoint_epoch_2.pt, step 12" in train_here(*command)
    (resume,) = records(here / "run", "resume")
    assert resume["step"] == 12
    after = read_json(here / "run" / "result.json")
    for name in ("status", "steps", "epochs", "test", "best", "training_seconds"):
        assert after[name] == before[name], name
    assert files(here / "run" / "checkpoints") == checkpoints


def test_a_file_of_a_few_lines_is_a_recipe_and_may_import_its_neighbour(here):
    (here / "sub").mkdir()
    model = "def model():\n    return nn.Linear(4, 2)\n"
    mine = RECIPE.replace(model, "from model_of_mine import model\n")
    (here / "sub" / "mine.py").write_text(mine)
    (here / "sub" / "model_of_mine.py").write_text(f"from torch import nn\n{model}")
    printed = train_here("sub/mine.py", "--run-dir", "run", "--lr", "0.02")
    assert "10 parameters" in printed
    assert "60 training samples" in printed
    result = read_json(here / "run" / "result.json")
    assert (result["recipe"], result["status"]) == ("mine", "completed")
    saved = saved_settings(here / "run")
    assert saved["recipe"] == str(here / "sub" / "mine.py")
    assert saved["lr"] == 0.02


@pytest.mark.slow
def test_spiral_reaches_its_accuracy_in_its_default_epochs(here):
    train_here("spiral", "--run-dir", "run")
    result = read_json(here / "run" / "result.json")
    assert result["test"]["accuracy"] >= 0.97
    assert result["test"]["samples"] == 1500
    assert result["epochs"] == 30


@pytest.mark.parametrize(("model", "place"), [("simple", ""), ("convnet", "MNIST/raw")])
def test_mnist_trains_both_models_from_files_where_others_put_them(here, model, place):
    write_mnist(here / "images" / place)
    flags = "--run-dir run --epochs 2 --batch-size 16 --lr 0.003 --threads 1 --model"
    train_here("mnist", "--data-dir", "images", *flags.split(), model)
    result = read_json(here / "run" / "result.json")
    assert result["test"]["samples"] == 40
    # Each digit lights up its own row: guessing gives 0.1.
    assert result["test"]["accuracy"] > 0.3


@pytest.fixture
def trained(here, of_two_ranks) -> Path:
    return shutil.copytree(of_two_ranks.path, here / "run")


@pytest.fixture
def evaluate(output_of):
    return lambda *flags: json.loads(output_of("evaluate", "run", *flags, "--json"))


def test_one_process_evaluates_as_ranks_did_and_no_damaged_checkpoint(trained, evaluate, refused):
    found, test = evaluate(), read_json(trained / "result.json")["test"]
    assert found["samples"] == test["samples"] == 15
    assert found["checkpoint"] == test["checkpoint"]
    for name in ("loss", "accuracy"):
        assert found[name] == pytest.approx(test[name], abs=1e-6)
    by_epoch = {r["epoch"]: r for r in records(trained, "evaluation") if r["split"] == "validation"}
    for name, epoch in (("last", 2), ("checkpoint_epoch_1.pt", 1), ("checkpoint_epoch_2", 2)):
        found = evaluate("--checkpoint", name, "--split", "validation")
        assert found["loss"] == pytest.approx(by_epoch[epoch]["loss"], abs=1e-6)
        assert found["samples"] == 15
    path = trained / "checkpoints" / "checkpoint_epoch_2.pt"
    path.write_bytes(path.read_bytes()[:-1])
    assert path.name in refused("evaluate", "run", "--checkpoint", "last")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("run --checkpoint nope", "best, last, checkpoint_epoch_1.pt"),
        (".", "run"),
        ("run --split everything", "everything"),
        ("run --data-dir x", "--data-dir: recipe small"),
        ("", "RUN"),
    ],
)
def test_a_wrong_evaluation_is_refused(refused, trained, arguments, says):
    assert says in refused("evaluate", *arguments.split())
