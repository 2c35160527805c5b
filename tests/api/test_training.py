"""`samestep.train` in the process that calls it: one rank, a run to look at, and interrupts."""

import contextlib
import dataclasses
import inspect
import json
import os
import pydoc
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep import UserError, read_records
from tests.api.recipes import Interrupts, made
from tests.command_line import RECIPE, read_json, train_here
from tests.loops.scripts import EXAMPLES

pytestmark = pytest.mark.usefixtures("here")


def test_the_run_tells_its_records_as_plain_dicts_and_has_no_pickle(capfd):
    trained = samestep.train(made(), quiet=True)
    assert capfd.readouterr() == ("", ""), "it is quiet"
    assert trained.history == list(read_records(trained.path))
    assert trained.history[0]["event"] == "start"
    assert [row["epoch"] for row in trained.per_epoch] == [1, 2, 3, 4]
    measured = [r["loss"] for r in trained.history if r.get("split") == "validation"]
    assert [row["validation_loss"] for row in trained.per_epoch] == measured
    assert all(isinstance(v, int | float) for row in trained.per_epoch for v in row.values())
    assert trained.result == read_json(trained.path / "result.json")
    assert trained.settings["epochs"] == 4
    assert os.fspath(trained) == str(trained.path)
    endings = {path.suffix for path in trained.path.rglob("*") if path.is_file()}
    assert endings == {".json", ".jsonl", ".toml", ".pt", ".lock"}
    for file in trained.path.rglob("*.pt"):
        torch.load(file, weights_only=True)


def test_it_goes_on_with_a_run_by_the_run_its_path_or_its_run_dir():
    recipe = made()
    whole = samestep.train(recipe, quiet=True, run_dir="whole").result["weights_sha256"]
    part = samestep.train(recipe, quiet=True, run_dir="part", epochs=1)
    samestep.train(part, recipe=recipe, resume=True, epochs=2, quiet=True)
    samestep.train("part", recipe=recipe, resume=True, epochs=3, quiet=True)
    again = samestep.train(recipe, run_dir=Path("part"), resume=True, quiet=True)
    assert again.result["weights_sha256"] == whole
    assert sum(record["event"] == "resume" for record in again.history) == 3


def test_settings_may_be_numpys_paths_lists_or_text_and_it_trains_in_a_thread():
    given = {"epochs": np.int64(1), "lr": np.float64(0.5), "run_dir": Path("x")}
    trained = samestep.train(made(), quiet=True, **given)
    assert (trained.settings["epochs"], trained.settings["lr"]) == (1, 0.5)
    assert trained.path == Path("x").absolute()
    assert repr(trained) == "TrainedRun('x')"
    with ThreadPoolExecutor(1) as pool:
        trained = pool.submit(samestep.train, made(), epochs=1, quiet=True).result()
    assert trained.result["status"] == "completed"
    trained = samestep.train(made(), epochs=1, quiet=True)
    for names in ("lr,momentum", ["lr", "momentum"]):
        more = {"allow_change": names, "lr": 0.5, "epochs": 2, "quiet": True}
        samestep.train(trained, recipe=made(), resume=True, **more)
        (trained.path / "checkpoints" / "checkpoint_epoch_2.pt").unlink()
    tagged = samestep.train(made(), epochs=1, track_tags=["a", "b"], quiet=True)
    assert tagged.settings["track_tags"] == "a,b"


def generators() -> tuple:
    """Return the states of all that draw random numbers, of which a user may draw from any."""
    _, keys, place, *_ = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), place


def test_random_numbers_and_threads_of_the_caller_stay_as_they_were():
    before = generators()
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    environment, seen, plain = dict(os.environ), [], made()
    noted = replace(plain, data=lambda: seen.append(torch.get_num_threads()) or plain.data())
    trained = samestep.train(noted, epochs=1, threads=threads + 1, quiet=True)
    assert set(seen) == {1}, "data has the same bits on any number of ranks"
    samestep.evaluate(trained, recipe=made())
    samestep.load(trained, recipe=made())
    assert generators() == before
    assert torch.get_num_threads() == threads
    assert signal.getsignal(signal.SIGINT) is handler
    assert dict(os.environ) == environment


def test_a_recipe_file_that_changes_the_working_directory_moves_no_run(here):
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (here / "moves.py").write_text(f"{RECIPE}\nimport os\nos.chdir({str(elsewhere)!r})\n")
    for words in ("moves.py --run-dir named", "moves.py", "named --resume --epochs 3"):
        os.chdir(here)
        train_here(*words.split())
    assert len([*(here / "runs").iterdir()]) == 1
    assert [*elsewhere.iterdir()] == []
    assert read_json(here / "named" / "result.json")["epochs"] == 3
    os.chdir(here)
    trained = samestep.train("moves.py", run_dir="called", quiet=True)
    assert trained.path == here / "called"
    assert Path.cwd() == elsewhere
    assert trained.result["status"] == "completed"
    assert samestep.evaluate(trained)["samples"] == 15
    assert trained.settings["recipe"] == str(here / "moves.py")


def test_an_interrupt_stops_after_the_step_saves_and_returns_the_run():
    recipe = made()
    whole = samestep.train(recipe, quiet=True).result["weights_sha256"]
    stopped = samestep.train(made(lambda: Interrupts(9)), quiet=True)
    assert stopped.result["status"] == "stopped"
    assert stopped.result["steps"] == 9
    more = {"resume": True, "allow_change": "recipe", "quiet": True}  # the new one has no signal
    again = samestep.train(stopped, recipe=recipe, **more)
    assert again.result["weights_sha256"] == whole


def test_a_second_interrupt_ends_the_training_and_a_signal_the_process_once_saved():
    class Twice(Interrupts):
        def forward(self, x):
            with contextlib.suppress(KeyError):
                if self.training and self.calls == 8:
                    os.kill(os.getpid(), signal.SIGINT)
            return super().forward(x)

    # The first comes within step 9, and the second before that step is over.
    with pytest.raises(UserError):
        samestep.train(made(lambda: Twice(9)), quiet=True, run_dir="twice")
    more = {"run_dir": "twice", "allow_change": "recipe"}
    resumed = samestep.train(made(), resume=True, quiet=True, **more).result
    assert resumed["status"] == "completed"
    whole = samestep.train(made(), quiet=True).result
    assert whole["weights_sha256"] == resumed["weights_sha256"]
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(sorted(Path("t").iterdir())))
    try:
        samestep.train(made(lambda: Interrupts(9, signum=signal.SIGTERM)), run_dir="t", quiet=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [Path("t/result.json") in files for files in heard] == [True]


REFUSED = {
    "an unknown setting": lambda: samestep.train(made(), epoch=2),
    "zero ranks": lambda: samestep.train(made(), nproc=0),
    "allow_change without resume": lambda: samestep.train(made(), allow_change=["lr"]),
    "a name that is no name": lambda: samestep.train(made(name="../up")),
    "two recipes": lambda: samestep.train(made(), recipe=made()),
    "a model that fails": lambda: samestep.train(made(lambda: 1 / 0)),
    "sizes that are none": lambda: samestep.verify(made(), nproc=(0, 1)),
    "what cannot be accepted": lambda: samestep.verify(made(), accept="loss"),
    "one run to compare": lambda: samestep.compare("a"),
    "no run to load": lambda: samestep.load("nowhere"),
    "a choice that there is not": lambda: samestep.train(made(), compile=True),
    "a setting of a script": lambda: samestep.verify(EXAMPLES / "gan.py", epochs=2),
    "a script's arguments of a recipe": lambda: samestep.verify(made(), arguments=["2"]),
    "a tolerance that is text": lambda: samestep.verify(made(), tolerance="x"),
    "no path to load": lambda: samestep.load(None),
    "a device that there is not": lambda: samestep.load("runs/a", device="cpux"),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_a_mistake_is_one_message_and_leaves_no_run(call, here):
    with pytest.raises(UserError) as told:
        call()
    assert len(str(told.value).splitlines()) == 1
    assert not (here / "runs").exists()
    assert "--" not in str(told.value), "flags are arguments here"
    # What a notebook shows of it.
    assert told.value._render_traceback_() == [f"samestep: {told.value}"]


def test_a_mistake_that_nobody_catches_is_one_line_with_the_place_of_the_call(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    try:
        samestep.train("spirl")
    except UserError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    (line,) = capsys.readouterr().err.splitlines()
    assert __file__ in line
    try:
        raise ValueError("of the user's own")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert "Traceback" in capsys.readouterr().err


def test_a_caught_error_leaves_the_way_of_showing_errors_as_it_was(here, monkeypatch):
    # An error of an earlier test may still be alive, and with it its way of being shown.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    (here / "bad.py").write_text("1 / 0")
    for recipe in ("spirl", "bad.py", made(lambda: 1 / 0)):
        with contextlib.suppress(UserError):
            samestep.train(recipe, quiet=True)
        assert sys.excepthook is sys.__excepthook__


def test_what_a_run_has_not_yet_and_a_group_of_its_own_are_told():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(UserError):
            samestep.train(made(), quiet=True)
    finally:
        torch.distributed.destroy_process_group()
    trained = samestep.train(made(), epochs=1, quiet=True)
    file = trained.path / "result.json"
    for spoil in (lambda: file.write_text("[" * 100_000), file.unlink):
        spoil()
        with pytest.raises(UserError):
            trained.result  # noqa: B018 - reading it is the test


def test_a_script_with_a_loop_of_its_own_is_not_run_as_a_recipe(here, refused):
    (here / "loop.py").write_text(
        "import pathlib, samestep\npathlib.Path('ran').touch()\n"
        "with samestep.open_run('runs/mine') as run:\n    pass\n"
    )
    for verb in ("train", "scale", "explain"):
        message = refused(verb, "loop.py")
        assert "torchrun" in message
        assert "samestep verify" in message
    with pytest.raises(UserError, match=r"python loop\.py"):
        samestep.train("loop.py")
    assert not (here / "ran").exists()


def test_a_training_within_another_or_at_reading_is_told_so(here):
    (here / "eager.py").write_text(f"{RECIPE}\nimport samestep\nsamestep.train('eager.py')\n")
    with pytest.raises(UserError) as told:
        samestep.train("eager.py", quiet=True)
    assert "__main__" in str(told.value)
    assert not (here / "runs").exists()

    def nested():
        samestep.train(made(), quiet=True)
        return nn.Linear(4, 2)

    with pytest.raises(UserError):
        samestep.train(made(nested), quiet=True)
    assert samestep.train(made(), epochs=1, quiet=True).result["status"] == "completed"


def test_help_lists_the_functions_their_settings_and_the_fields_of_a_recipe():
    assert {*samestep.__all__} > {"train", "load", "evaluate", "predict", "verify", "compare"}
    settings = {f.name for f in dataclasses.fields(samestep.Settings)}
    for function in (samestep.train, samestep.verify):
        assert settings < {*inspect.signature(function).parameters}
    text = pydoc.plain(pydoc.render_doc(samestep.Recipe))
    for field in dataclasses.fields(samestep.Recipe):
        assert f"\n |  {field.name}: " in text


def test_the_runs_of_a_folder_are_listed_also_from_within_a_training():
    found = []

    def loss(outputs, targets):
        if len(outputs) == 10:  # of a step
            found[:] = [run["state"] for run in samestep.runs()]
        return nn.functional.cross_entropy(outputs, targets)

    samestep.train(made(loss=loss), epochs=1, quiet=True, run_dir="runs/first")
    assert found == ["running"]
    (one,) = samestep.runs(recipe="recipe", sort="metric")
    assert (one["state"], one["epochs"]) == ("completed", 1)
    assert samestep.runs(recipe="spiral") == []
    for call in (lambda: samestep.runs("nowhere"), lambda: samestep.runs(sort="size")):
        with pytest.raises(UserError):
            call()


ALL_KINDS = """
import torch
from torch import nn
from samestep import Recipe, Splits
SCALE = torch.ones(4)  # made where the file is read: in the modes of the caller, if nobody minds
def data():
    x = torch.randn(90, 4, generator=torch.Generator().manual_seed(7)) * SCALE
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:60], y[:60]), validation=(x[60:75], y[60:75]), test=(x[75:], y[75:]))
def model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
recipe = Recipe(
    model=model, data=data, read=lambda _, file: [torch.arange(4.0), -torch.arange(4.0)],
    settings={"epochs": 5, "batch_size": 12, "lr": 0.05, "oversubscribe": True},
    accepts=("dropout",),
)
"""
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


AROUND = {
    "nothing": contextlib.nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "float64": lambda: default_dtype(torch.float64),
    "another device": lambda: torch.device("meta"),
}


@contextlib.contextmanager
def everything():
    with contextlib.ExitStack() as stack:
        for around in AROUND.values():
            stack.enter_context(around())
        yield


TOGETHER = {"nothing": contextlib.nullcontext, "everything": everything}


def modes() -> tuple:
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        *(torch.get_default_device(), torch.is_autocast_enabled("cpu")),
        *(torch.is_autocast_cache_enabled(), torch.autocast_increment_nesting()),
        torch.autocast_decrement_nesting(),
    )


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Return the run that the command line trains in a precision: its folder holds the recipe."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "small.py").write_text(ALL_KINDS)
    (folder / "any.txt").write_text("")

    @cache
    def train(precision: str, *more: str) -> Path:
        path = folder / "-".join([precision, *more])
        flags = ("--precision", precision, "--run-dir", str(path), *more)
        train_here(str(folder / "small.py"), *flags)
        return path

    return train


def losses(path: Path) -> list[float]:
    return [r["loss"] for r in samestep.read_records(path) if r["event"] == "step"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_is_the_training_of_the_command_line_in_each_mode(precision, typed, tmp_path, output_of):
    path = typed(precision, "--log-every", "1")
    assert len(losses(path)) == 25
    file, expected = path.parent / "any.txt", read_json(path / "result.json")
    evaluated = json.loads(output_of("evaluate", path, "--json"))
    lines = output_of("predict", path, file, "--json").splitlines()
    predicted = [json.loads(line) for line in lines]
    saved = torch.load(path / "checkpoints" / evaluated["checkpoint"], weights_only=True)
    for mode, around in AROUND.items() if precision == "bf16" else TOGETHER.items():
        with around():
            before = modes()
            how = {"precision": precision, "log_every": 1, "run_dir": tmp_path / mode}
            trained = samestep.train(path.parent / "small.py", quiet=True, **how)
            assert modes() == before
            assert samestep.evaluate(path) == evaluated, mode
            assert samestep.predict(path, file) == predicted, mode
            model = samestep.load(path)
        assert losses(trained.path) == losses(path), mode
        for name in ("weights_sha256", "test", "best", "steps", "status"):
            assert trained.result[name] == expected[name], mode
        kept = [(run / "settings.toml").read_text() for run in (path, trained.path)]
        assert kept[0] == kept[1], mode
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, saved["model"][name]), mode
        assert all(p.requires_grad and not p.is_inference() for p in model.parameters())


def test_on_two_ranks_it_is_the_command_line_s_to_the_last_bit(typed, tmp_path):
    path = typed("bf16", "--virtual-ranks", "2")
    how = {"nproc": 2, "precision": "bf16", "virtual_ranks": 2, "run_dir": tmp_path / "two"}
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        trained = samestep.train(path.parent / "small.py", quiet=True, **how)
        assert samestep.compare(path, trained)["same_training"][0]["verdict"] == "equal"
    assert trained.result["weights_sha256"] == read_json(path / "result.json")["weights_sha256"]
