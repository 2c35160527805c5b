"""Bad input to `samestep train`: exit code 2, one message that teaches, nothing half-written."""

import gzip
import socket
import subprocess
import sys
import typing
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from samestep.settings import Settings
from tests.command_line import RECIPE, read_json, refusal, run, start, tree
from tests.idx_files import write_mnist

TYPES = typing.get_type_hints(Settings)
NUMBERS = [
    field.name
    for field in fields(Settings)
    if {int, float} & {TYPES[field.name], *typing.get_args(TYPES[field.name])}
]
MAY_BE_ZERO = {"momentum", "weight_decay", "warmup_steps", "seed", "num_workers", "min_delta"}


def refuse(here: Path, *arguments: str, **more) -> str:
    """Run a command that has to be refused without leaving a trace; return its message."""
    before = tree(here)
    message = refusal("train", *arguments, folder=here.parent / "outputs", **more)
    left = {path for path in tree(here) - before if path.name != "rank-0.log"}
    assert not left, "something was left behind"
    return message


@dataclass
class Bad:
    """A command, and what its message has to say."""

    flags: str
    says: tuple[str, ...]


WRONG_FLAGS = {
    "unknown recipe": Bad("spirla", ("no recipe 'spirla'", "Did you mean 'spiral'?", "mnist")),
    "recipe file missing": Bad("nope.py", ("no file nope.py",)),
    "directory without a run": Bad(".", ("settings.toml", "no run")),
    "no target": Bad("--epochs 3", ("--epochs", "spiral", "recipe file")),
    "unknown flag": Bad("spiral --epoch 3", ("Unrecognized options: --epoch", "--epochs")),
    "word too many": Bad("spiral extra", ("Unrecognized options: extra",)),
    "ill-typed flag": Bad("spiral --epochs three", ("--epochs", "'three'")),
    "value outside of the choices": Bad("spiral --optimizer lion", ("lion", "adam", "sgd")),
    "flag without its value": Bad("spiral --lr", ("--lr",)),
    "ill-typed option": Bad("spiral --hidden-dims 64 x", ("--hidden-dims", "x")),
    "TOML file missing": Bad("spiral --config nope.toml", ("nope.toml", "No such file")),
    "TOML file is a directory": Bad("spiral --config .", ("cannot be read", "directory")),
    "batch not divisible": Bad(
        "spiral --global-batch-size 32 --accumulate 3", ("32", "multiple of 3", "30 or 33")
    ),
    "both batch sizes contradict": Bad(
        "spiral --global-batch-size 32 --batch-size 12", ("multiple of 12", "24 or 36")
    ),
    "three batch settings contradict": Bad(
        "spiral --global-batch-size 32 --batch-size 16 --accumulate 4", ("--accumulate is 4",)
    ),
    "drop last leaves nothing": Bad(
        "spiral --batch-size 9000 --drop-last", ("--drop-last", "7000", "9000")
    ),
    "resume without a run": Bad("spiral --resume", ("--resume needs a run",)),
    "run directory below a file": Bad(
        "spiral --run-dir FILE/run", ("FILE/run", "could not be written", "--run-dir")
    ),
    "run directory that cannot be made": Bad(
        "spiral --run-dir /proc/none/run", ("/proc/none/run", "could not be written")
    ),
    "run directory is a file": Bad("spiral --run-dir FILE", ("FILE", "could not be written")),
    "NCCL without CUDA": Bad(
        "spiral --backend nccl --device cpu", ("--backend nccl", "CUDA", "gloo")
    ),
    "no Apple GPU": Bad("spiral --device mps", ("--device mps", "--device auto or cpu")),
    "unknown metric": Bad("spiral --monitor f1", ("--monitor f1", "loss, accuracy")),
    "momentum of adam": Bad("spiral --momentum 0.9", ("--momentum", "--optimizer sgd")),
    "scaling without a base": Bad("spiral --lr-scaling linear", ("--base-batch-size",)),
    "no ranks": Bad("spiral --nproc 0", ("--nproc is 0",)),
    "seed beyond 63 bits": Bad("spiral --seed 9223372036854775808", ("--seed", "2^63")),
    "learning rate is not a number": Bad("spiral --lr nan", ("--lr is nan",)),
    "dropout above 1": Bad("spiral --dropout 1.5", ("--dropout is 1.5", "below 1")),
    "a layer without units": Bad("spiral --hidden-dims 8 0", ("--hidden-dims", "1 or more")),
    "one sample": Bad("spiral --num-samples 1", ("--num-samples is 1", "2 or more")),
    "too few samples to split": Bad("spiral --num-samples 3", ("3 samples", "too few")),
    "negative noise": Bad("spiral --noise -1", ("--noise is -1",)),
    "validation takes all": Bad("mnist --validation-fraction 1", ("--validation-fraction",)),
    "unknown tracker": Bad(
        "spiral --track comet,wanb", ("no tracker 'wanb'", "Did you mean 'wandb'?", "tensorboard")
    ),
    "tracker twice": Bad("spiral --track wandb,wandb", ("names wandb twice",)),
    "tracker file missing": Bad("spiral --track nope.py", ("--track nope.py", "cannot be read")),
    "tracker file that is none": Bad("spiral --track FILE.py", ("FILE.py", "function start()")),
    "tracker file of a taken name": Bad("spiral --track wandb.py", ("wandb is taken", "name")),
    "project that W&B refuses": Bad(
        "spiral --track wandb --track-project a/b#c", ("--track-project 'a/b#c'", "'#'", "'/'")
    ),
    "project too long": Bad(
        f"spiral --track-project {'p' * 129}", ("has 129 characters", "1 to 128")
    ),
    "tag too long": Bad(f"spiral --track-tags a,{'t' * 65}", ("--track-tags", "65 characters")),
    "no time for a tracker": Bad("spiral --track-timeout 0", ("--track-timeout is 0",)),
    "no data": Bad("mnist --data-dir nowhere", ("nowhere", "samestep data get mnist")),
}


@pytest.mark.parametrize("name", WRONG_FLAGS)
def test_a_wrong_command_is_refused_with_what_to_do(here, name):
    (here / "FILE").touch()
    (here / "FILE.py").touch()
    message = refuse(here, *WRONG_FLAGS[name].flags.split())
    for words in WRONG_FLAGS[name].says:
        assert words in message


# One of each place where a rank finds a mistake: the flags, the settings, the world, the data, the
# plan, the run directory.
@pytest.mark.parametrize(
    "name",
    [
        "ill-typed flag",
        "momentum of adam",
        "NCCL without CUDA",
        "one sample",
        "three batch settings contradict",
        "run directory below a file",
        "unknown recipe",
        "unknown tracker",
        "tracker file missing",
    ],
)
def test_two_ranks_refuse_as_one(here, name):
    (here / "FILE").touch()
    message = refuse(here, *WRONG_FLAGS[name].flags.split(), world_size=2)
    for words in WRONG_FLAGS[name].says:
        assert words in message


def test_a_batch_that_two_ranks_cannot_share_names_the_sizes_that_would_do(here):
    message = refuse(here, "spiral", "--global-batch-size", "33", world_size=2)
    assert "33 is not a multiple of 2 (2 ranks)" in message
    assert "32 or 34" in message


def test_starting_ranks_within_a_launcher_is_refused(here):
    message = refuse(here, "spiral", "--nproc", "2", world_size=2)
    assert "torchrun has already started 2" in message
    assert "Leave --nproc out" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_absent_is_named_with_the_way_out(here):
    message = refuse(here, "spiral", "--device", "cuda")
    assert "no CUDA device here" in message
    assert "--device auto or cpu" in message


def test_more_ranks_than_samples_are_refused(here):
    (here / "one.py").write_text(RECIPE.replace("[:60]", "[:1]"))
    message = refuse(here, "one.py", world_size=2)
    assert "2 ranks are more than the 1 training samples" in message


def test_neither_epochs_nor_steps_is_a_question_to_the_user(here):
    (here / "endless.py").write_text(RECIPE.replace('"epochs": 2, ', ""))
    assert "--epochs or --max-steps" in refuse(here, "endless.py")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_negative_number_is_refused_by_its_flag_and_by_its_toml_key(here, name):
    flag = f"--{name.replace('_', '-')}"
    assert f"{flag} is -1" in refuse(here, "spiral", flag, "-1")
    (here / "my.toml").write_text(f"{name} = -1")
    assert f"{flag} is -1" in refuse(here, "spiral", "--config", "my.toml")


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - MAY_BE_ZERO))
def test_a_size_of_zero_is_refused(here, name):
    flag = f"--{name.replace('_', '-')}"
    message = refuse(here, "spiral", flag, "0")
    assert f"{flag} is 0" in message
    assert "greater than 0" in message


BAD_FILES = {
    "unknown key": (
        "epoch = 2",
        ("unknown setting 'epoch'", "Did you mean 'epochs'?", "batch_size", "hidden_dims"),
    ),
    "unknown option": ("[options]\nnois = 1.0", ("'nois'", "Did you mean 'noise'?")),
    "unknown table": ("[training]\nlr = 1.0", ("'training'", "The settings:")),
    "text for a number": ('epochs = "two"', ("epochs = 'two'", "int", "str")),
    "fraction for a count": ("batch_size = 1.5", ("batch_size = 1.5", "int")),
    "number for a switch": ("drop_last = 1", ("drop_last = 1", "bool")),
    "outside of the choices": ('schedule = "step"', ("schedule = 'step'",)),
    "list of texts": ('hidden_dims = ["a"]', ("hidden_dims",)),
    "no TOML": ("epochs = = 2", ("no valid TOML", "line 1")),
    "not a text": ("\udcff", ("no valid TOML",)),
    "options is no table": ("options = 3", ("[options]", "table")),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_wrong_toml_file_is_named_with_its_fault(here, name):
    text, says = BAD_FILES[name]
    (here / "my.toml").write_text(text, errors="surrogateescape")
    message = refuse(here, "spiral", "--config", "my.toml")
    assert "my.toml" in message
    for words in says:
        assert words in message


OWN_LR = """
from dataclasses import dataclass

@dataclass
class Own:
    lr: float = 1.0

def data"""
BAD_RECIPES = {
    "no recipe": ("x = 1\n", ("bad.py has no `recipe`", "recipe = Recipe(")),
    "something else": ("recipe = 3\n", ("bad.py", "type int")),
    "syntax error": ("x = 1\n\ndef f(:\n", ("bad.py:3: invalid syntax",)),
    "raises": ("import os\n\n\nraise RuntimeError('boom')\n", ("bad.py:4: RuntimeError: boom",)),
    "raises further inside": ("import json\n\njson.loads('{')\n", ("bad.py:3: JSONDecodeError",)),
    "imports what is absent": (
        "import samestep\nimport nothing_of_this_name\n",
        ("bad.py:2: ModuleNotFoundError",),
    ),
    "unknown setting": (
        RECIPE.replace('"epochs"', '"epoch"'),
        ("bad.py", "'epoch'", "Did you mean 'epochs'?"),
    ),
    "options that are no dataclass": (
        RECIPE.replace("Recipe(model", "Recipe(options=int, model"),
        ("bad.py", "dataclass"),
    ),
    "an option named like a setting": (
        RECIPE.replace("Recipe(model", "Recipe(options=Own, model").replace("def data", OWN_LR),
        ("bad.py", "'lr'", "another name"),
    ),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_a_wrong_recipe_file_is_named_with_its_line(here, name):
    text, says = BAD_RECIPES[name]
    (here / "bad.py").write_text(text)
    message = refuse(here, "bad.py")
    for words in says:
        assert words in message


def break_images(folder: Path) -> Path:
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    return path


def break_magic(folder: Path) -> Path:
    path = folder / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(b"\1" + gzip.decompress(path.read_bytes())[1:]))
    return path


def break_length(folder: Path) -> Path:
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())
    return path


def lose_labels(folder: Path) -> Path:
    path = folder / "t10k-labels-idx1-ubyte.gz"
    path.unlink()
    return path.with_suffix("")


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (break_images, "truncated"),
        (break_magic, "no IDX file"),
        (lose_labels, "is not in"),
        (break_length, "120 images but 40 labels"),
    ],
)
def test_broken_data_files_are_named_before_anything_is_written(here, break_it, says):
    path = break_it(write_mnist(here / "mnist"))
    for world_size in (1, 2):
        message = refuse(here, "mnist", "--data-dir", "mnist", world_size=world_size)
        assert path.name in message
        assert says in message


@pytest.fixture
def finished(here) -> str:
    """A run of two epochs, in the working directory."""
    (here / "small.py").write_text(RECIPE)
    run("train", "small.py", "--run-dir", "done", folder=here.parent / "outputs")
    return "done"


@pytest.mark.parametrize("target", ["small.py", "done"])
def test_a_directory_that_holds_a_run_is_not_written_over(here, finished, target):
    before = (here / finished / "events.jsonl").read_bytes()
    message = refuse(here, target, "--run-dir", finished)
    assert "already holds a run" in message
    assert f"samestep train {finished} --resume" in message
    assert (here / finished / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [
        "done --resume --lr 0.5",
        "done --resume --batch-size 20",
        "done --resume --seed 1",
        "small.py --run-dir done --resume --lr 0.5",
    ],
)
def test_a_resumed_run_does_not_become_another_training(here, finished, command):
    contents = {path: path.read_bytes() for path in tree(here / finished) if path.is_file()}
    message = refuse(here, *command.split())
    assert "cannot change when a run is resumed" in message
    assert contents == {path: path.read_bytes() for path in contents}


def test_a_folder_with_the_name_of_a_recipe_does_not_hide_it(here):
    (here / "spiral").mkdir()
    run("train", "spiral", "--max-steps", "1", folder=here.parent / "outputs")
    assert len(list((here / "runs").iterdir())) == 1


def test_a_run_does_not_go_on_with_another_recipe(here, finished):
    message = refuse(here, "spiral", "--run-dir", finished, "--resume")
    assert "recipe small, not of spiral" in message


def test_a_run_does_not_go_on_with_another_model(here, finished):
    (here / "small.py").write_text(RECIPE.replace("nn.Linear(4, 2)", "nn.Linear(4, 2, bias=False)"))
    message = refuse(here, finished, "--resume", "--epochs", "3")
    assert "does not fit the model" in message
    assert "bias is not in the model" in message


def test_a_run_does_not_go_on_with_other_data(here, finished):
    (here / "small.py").write_text(RECIPE.replace("[:60]", "[:50]"))
    message = refuse(here, finished, "--resume", "--epochs", "3")
    assert "num_samples = 60, now it is 50" in message


# From its fourth step in the second epoch on, the loss of one rank is NaN.
NAN = RECIPE.replace(
    "recipe = Recipe(",
    """
import os
steps = 0

def loss(outputs, targets):
    global steps
    steps += torch.is_grad_enabled()
    value = nn.functional.cross_entropy(outputs, targets)
    return value * (float("nan") if steps >= 10 and RANK else 1.0)

recipe = Recipe(loss=loss, """,
)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("log_every", ["1", "1000"])
def test_a_loss_that_becomes_nan_stops_with_step_and_rate_and_keeps_the_last_good_checkpoint(
    here, world_size, log_every
):
    """Also when only one rank meets it, and when nothing is logged before the epoch ends."""
    last = str(world_size - 1)
    (here / "nan.py").write_text(NAN.replace("RANK", f'os.environ.get("RANK", "0") == "{last}"'))
    message = refusal(
        "train",
        "nan.py",
        "--run-dir",
        "run",
        "--lr",
        "0.03125",
        "--global-batch-size",
        "10",
        "--log-every",
        log_every,
        world_size=world_size,
        folder=here.parent / "outputs",
    )
    assert "The loss is NaN or infinite at step 10 (learning rate 0.0312)" in message
    result = read_json(here / "run" / "result.json")
    assert result["status"] == "failed"
    assert "step 10" in result["reason"]
    assert result["test"] is None
    index = read_json(here / "run" / "checkpoints" / "index.json")
    assert [entry["path"] for entry in index["checkpoints"]] == ["checkpoint_epoch_1.pt"]
    assert not list((here / "run").rglob("*.tmp"))
    evaluated = run("evaluate", "run", "--checkpoint", "last", folder=here.parent / "outputs")
    assert "checkpoint_epoch_1.pt" in evaluated.printed(0)


def test_a_learning_rate_that_is_far_too_large_is_named(here):
    message = refusal(
        "train",
        "spiral",
        "--run-dir",
        "run",
        "--optimizer",
        "sgd",
        "--lr",
        "1e30",
        folder=here.parent / "outputs",
    )
    assert "learning rate 1e+30" in message
    assert "smaller --lr" in message


def test_a_port_that_is_taken_is_named(here):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        message = refuse(here, "spiral", world_size=2, environment={"MASTER_PORT": port})
    assert f"Port {port} on 127.0.0.1 is taken" in message
    assert "MASTER_PORT" in message


def test_an_error_that_was_not_foreseen_says_where_it_arose(here):
    """Exit code 1; what is no mistake of the user's keeps its traceback, here in the log."""
    bug = (
        "\n\ndef loss(outputs, targets):\n    if len(seen) == 3:\n        raise KeyError('lost')\n"
    )
    bug += "    seen.append(1)\n    return nn.functional.cross_entropy(outputs, targets)\n\n"
    bug += "seen = []\n"
    text = RECIPE.replace("\nrecipe = Recipe(", f"{bug}\nrecipe = Recipe(loss=loss, ")
    (here / "bug.py").write_text(text)
    ranks = start("train", "bug.py", "--run-dir", "run", folder=here.parent / "outputs")
    assert ranks.wait() == [1]
    assert "samestep: KeyError: 'lost'\n  at " in ranks.printed(0)
    assert "bug.py:" in ranks.printed(0)
    assert "Traceback" not in ranks.printed(0)
    assert "Traceback" in (here / "run" / "rank-0.log").read_text()
    assert read_json(here / "run" / "result.json")["status"] == "failed"


def test_a_mistake_is_found_before_the_ranks_are_started(here):
    """So that it is one process that speaks, and soon."""
    done = subprocess.run(
        [sys.executable, "-m", "samestep", "train", "spiral", "--nproc", "2", "--epochs", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "samestep: --epochs is 0; it must be greater than 0.\n"
    assert not list(here.iterdir())
