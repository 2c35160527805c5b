"""Bad input to `samestep train`: exit code 2, one message that teaches, nothing half-written."""

import re
import socket
import typing
from dataclasses import fields

import pytest

from samestep.base.errors import UserError
from samestep.base.settings import Settings, flag_name
from tests.command_line import RECIPE, call, read_json, refusal, train_here, tree
from tests.tiny import files

TYPES = typing.get_type_hints(Settings)
NUMBERS = [
    field.name
    for field in fields(Settings)
    if {int, float} & {TYPES[field.name], *typing.get_args(TYPES[field.name])}
]
MAY_BE_ZERO = {
    *("momentum", "weight_decay", "warmup_steps", "seed", "num_workers", "min_delta"),
    *("shuffle_buffer", "stall_s", "warmup_from", "lr_end"),
}


@pytest.fixture
def refuse(here, refused):
    """Run a command, in this process if alone, that leaves no trace; return its message."""

    def run(*arguments: str, world_size: int = 1, **more) -> str:
        before = tree(here)
        if world_size == 1:
            message = refused("train", *arguments)
        else:
            more = {"world_size": world_size, "folder": here.parent / "outputs", **more}
            message = refusal("train", *arguments, **more)
        left = {path for path in tree(here) - before if path.name != "rank-0.log"}
        assert not left, "something was left behind"
        return message

    return run


# What is wrong → the command, and the names and values that its message has to give.
WRONG_FLAGS = {
    "unknown recipe": ("spirla", "'spirla' 'spiral' mnist"),
    "recipe file missing": ("nope.py", "nope.py"),
    "directory without a run": (".", "settings.toml"),
    "no target": ("--epochs 3", "--epochs spiral"),
    "unknown flag": ("spiral --epoch 3", "--epoch --epochs"),
    "word too many": ("spiral extra", "extra"),
    "ill-typed flag": ("spiral --epochs three", "--epochs three"),
    "TOML file missing": ("spiral --config nope.toml", "nope.toml"),
    "TOML file is a directory": ("spiral --config .", "directory"),
    "resume without a run": ("spiral --resume", "--resume"),
    "run directory below a file": ("spiral --run-dir FILE/run", "FILE/run --run-dir"),
    "run directory that cannot be made": ("spiral --run-dir /proc/none/run", "/proc/none/run"),
    "run directory is a file": ("spiral --run-dir FILE", "FILE"),
    "NCCL without CUDA": ("spiral --backend nccl --device cpu", "--backend nccl CUDA gloo"),
    "no Apple GPU": ("spiral --device mps", "--device mps, --device auto"),
    "unknown metric": ("spiral --monitor f1", "--monitor f1 loss accuracy"),
    "momentum of adam": ("spiral --momentum 0.9", "--momentum, --optimizer sgd"),
    "seed beyond 63 bits": ("spiral --seed 9223372036854775808", "--seed 2^63"),
    "learning rate is not a number": ("spiral --lr nan", "--lr nan"),
    "dropout above 1": ("spiral --dropout 1.5", "--dropout 1.5"),
    "a layer without units": ("spiral --hidden-dims 8 0", "--hidden-dims 1"),
    "one sample": ("spiral --num-samples 1", "--num-samples 2"),
    "too few samples to split": ("spiral --num-samples 3", "3 samples"),
    "negative noise": ("spiral --noise -1", "--noise -1"),
    "validation takes all": ("mnist --validation-fraction 1", "--validation-fraction"),
    "unknown tracker": ("spiral --track comet,wanb", "'wanb' 'wandb' tensorboard"),
    "project that W&B refuses": (
        "spiral --track wandb --track-project a/b#c",
        "--track-project 'a/b#c' '#' '/'",
    ),
    "no data": ("mnist --data-dir nowhere", "nowhere, data get mnist"),
}


def assert_says(message: str, words: str) -> None:
    assert [word for word in words.replace(",", "").split() if word not in message] == [], message


# Two ranks refuse as one: a mistake that every rank finds, and one that only rank 0 does.
ON_TWO = [(name, 2) for name in ("NCCL without CUDA", "run directory below a file")]


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in WRONG_FLAGS), *ON_TWO])
def test_a_wrong_command_is_refused_with_what_to_do(here, refuse, name, ranks):
    (here / "FILE").touch()
    command, words = WRONG_FLAGS[name]
    assert_says(refuse(*command.split(), world_size=ranks), words)


def test_a_node_that_does_not_see_the_run_directory_of_its_job_is_named(refuse, monkeypatch):
    monkeypatch.setenv("SAMESTEP_RUN_DIR", "/no/such/run")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURMD_NODENAME", "node7.there")
    assert_says(refuse("spiral"), "/no/such/run node7.there")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_refused_by_its_flag(name):
    for wrong in {-1, -1 if name in MAY_BE_ZERO else 0}:
        with pytest.raises(UserError, match=rf"--{flag_name(name)} \w+ {wrong}\b"):
            Settings(**{name: wrong})


# What is wrong → the text of the file, and what its message has to give.
BAD_FILES = {
    "out of range": ("epochs = -1", "--epochs is -1"),
    "unknown key": ("epoch = 2", "'epoch' 'epochs' batch_size hidden_dims"),
    "unknown option": ("[options]\nnois = 1.0", "'nois' 'noise'"),
    "unknown table": ("[training]\nlr = 1.0", "'training' batch_size"),
    "outside of the choices": ('schedule = "step"', "schedule = 'step'"),
    "no TOML": ("epochs = = 2", "TOML line 1"),
    "not a text": ("\udcff", "TOML"),
    "options is no table": ("options = 3", "[options] table"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_wrong_toml_file_is_named_with_its_fault(here, refuse, name):
    text, says = BAD_FILES[name]
    (here / "my.toml").write_text(text, errors="surrogateescape")
    message = refuse("spiral", "--config", "my.toml")
    assert "my.toml" in message or name == "out of range"
    assert_says(message, says)


def options(kind: str) -> tuple[str, str]:
    return "Recipe(model", f"Recipe(options={kind}, model"


OWN_LR = "from dataclasses import make_dataclass\nOwn = make_dataclass('Own', [('lr', float, 1)])\n"
BAD_RECIPES = {
    "no recipe": ("x = 1\n", "bad.py recipe = Recipe("),
    "of Lightning": ("import lightning as L\n", "bad.py samestep.lightning.recipe("),
    "something else": ("recipe = 3\n", "bad.py int"),
    "syntax error": ("x = 1\n\ndef f(:\n", "bad.py:3:"),
    "raises inside": ("import json\njson.loads('{')\nrecipe = 1\n", "bad.py:2: JSONDecodeError"),
    "imports what is absent": ("\nimport absent\nrecipe = 1\n", "bad.py:2: ModuleNotFoundError"),
    "imports what an error hides": (
        "try: 1 / 0\nexcept Exception as e: raise ImportError('No Trainer') from e\nrecipe = 1\n",
        "bad.py:2: ImportError Trainer ZeroDivisionError",
    ),
    "unknown setting": (RECIPE.replace('"epochs"', '"epoch"'), "bad.py 'epoch' 'epochs'"),
    "options that are no dataclass": (RECIPE.replace(*options("int")), "bad.py dataclass"),
    "an option named like a setting": (OWN_LR + RECIPE.replace(*options("Own")), "bad.py 'lr'"),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_a_wrong_recipe_file_is_named_with_its_line(here, refuse, name):
    text, says = BAD_RECIPES[name]
    (here / "bad.py").write_text(text)
    assert_says(refuse("bad.py"), says)


def test_a_directory_that_holds_a_run_goes_on_with_no_other_data(here, refuse):
    (here / "small.py").write_text(RECIPE)
    train_here("small.py", "--run-dir", "done")
    before = files(here / "done")
    for target in ("small.py", "done"):
        assert "samestep train done --resume" in refuse(target, "--run-dir", "done")
    assert files(here / "done") == before
    # Of another length: Python knows what it compiled within the same second by its size.
    (here / "small.py").write_text(RECIPE.replace("[:60]", "[: 50]"))
    message = refuse("done", "--resume", "--epochs", "3", "--allow-change", "recipe")
    assert_says(message, "num_samples = 60, 50")


def test_a_folder_with_the_name_of_a_recipe_does_not_hide_it(here):
    (here / "spiral").mkdir()
    train_here("spiral", "--max-steps", "1")
    assert len(list((here / "runs").iterdir())) == 1


# From its fourth step in the second epoch on, the loss of one rank is NaN.
NAN = RECIPE.replace(
    "recipe = Recipe(",
    """
import os
def loss(outputs, targets, *, step):
    value = nn.functional.cross_entropy(outputs, targets)
    last = os.environ.get("RANK", "1") == "1"
    return value * (float("nan") if step >= 9 and last else 1.0)
recipe = Recipe(loss=loss, """,
)


def test_a_loss_that_becomes_nan_stops_with_the_last_good_checkpoint(here, output_of):
    (here / "nan.py").write_text(NAN)
    flags = "--run-dir run --lr 0.03125 --batch-size 10 --log-every 1000"
    more = {"world_size": 2, "folder": here.parent / "outputs"}
    message = refusal("train", "nan.py", *flags.split(), **more)
    assert_says(message, "NaN 0.0312")
    assert "step 10 " in message
    result = read_json(here / "run" / "result.json")
    assert result["status"] == "failed"
    assert "step 10" in result["reason"]
    assert result["test"] is None
    index = read_json(here / "run" / "checkpoints" / "index.json")
    assert [entry["path"] for entry in index["checkpoints"]] == ["checkpoint_epoch_1.pt"]
    assert not list((here / "run").rglob("*.tmp"))
    assert "checkpoint_epoch_1.pt" in output_of("evaluate", "run", "--checkpoint", "last")


def test_a_taken_port_is_named_and_mistakes_found_before_ranks_start(refuse, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        message = refuse("spiral", world_size=2, environment={"MASTER_PORT": port})
    assert_says(message, f"127.0.0.1:{port} MASTER_PORT")
    monkeypatch.setattr("samestep.launch.ranks.start.run_ranks", None)
    assert re.search(r"--epochs .* 0\b", refuse("spiral", "--nproc", "2", "--epochs", "0"))


# A bug that is met as a checkpoint is written.
BUG = """
class Model(nn.Linear):
    def state_dict(self, **how):
        if len(seen) > 9: raise KeyError('lost')
        return super().state_dict(**how)
    def forward(self, x):
        seen.append(1)
        return super().forward(x)
seen = []
recipe = """


def test_an_error_that_was_not_foreseen_says_where_it_arose(here, capfd):
    text = RECIPE.replace("\nrecipe = ", BUG).replace("return nn.Linear(", "return Model(")
    (here / "bug.py").write_text(text)
    assert call("train", "bug.py", "--run-dir", "run") == 1
    printed, told = capfd.readouterr()
    assert "samestep: KeyError: 'lost'\n  at " in told
    assert "bug.py:" in told
    assert "Traceback" not in printed + told
    assert "Traceback" in (here / "run" / "rank-0.log").read_text()
    assert read_json(here / "run" / "result.json")["status"] == "failed"


def test_ranks_wait_for_each_other_as_long_as_the_user_says(here, refused, monkeypatch):
    from samestep.shell.api import training

    def join(world, timeout_s):
        raise UserError(f"joined with {timeout_s}")

    monkeypatch.setattr(training, "join", join)
    assert "joined with 7.5" in refused("train", "--timeout-s", "7.5", "spiral")
