"""TrackerLogger in anyone's own Trainer: what was logged is there once, whatever trackers do."""

import math
import os
import re
import signal
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import samestep
from tests import tiny
from tests.command_line import read_json, typed
from tests.processes import run_ranks, start_ranks
from tests.tracking import readers
from tests.tracking.test_following import PATIENCE_S, TRACKER, Training, children_of, send, what

PLANTED = "hunter2" * 6
# Without a key of anybody.
QUIET = {"COMET_API_KEY": "", "WANDB_API_KEY": "", "MLFLOW_TRACKING_URI": "", "TRACKER_FAULT": ""}


def make_module():
    import torch
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self, lr=0.1, api_key=PLANTED, layers=(2, 1), nothing=None, odd=None):
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(3)
            self.line = torch.nn.Linear(2, 1)

        def training_step(self, batch, index):
            loss = self.line(batch).square().mean()
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            self.log("lr/now", self.hparams.lr, rank_zero_only=True)
            self.log("a:b*", index if index % 2 else math.nan, rank_zero_only=True)
            return loss if index != self.hparams.odd else self.no_such_thing

        def validation_step(self, batch, index, name="val_loss"):
            self.log(name, self.line(batch).square().mean(), sync_dist=True)

        def test_step(self, batch, index):
            self.validation_step(batch, index, "test_loss")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

        def train_dataloader(self):
            data = torch.randn(24, 2, generator=torch.Generator().manual_seed(5))
            return torch.utils.data.DataLoader(data, batch_size=2)

        val_dataloader = test_dataloader = train_dataloader

    return Module


def fit(folder, trackers, environment, more=None, epochs=2, end_s=PATIENCE_S, faults=()):
    """Fit and test on this rank, as by torchrun; `logged` is what loggers got: (step, metrics)."""
    import logging
    import warnings

    os.environ.update(QUIET | {"HOME": folder, "TORCHELASTIC_RUN_ID": "test"} | environment)
    os.chdir(folder)
    for part in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(part).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.utilities import rank_zero_only

    from samestep.base.run.directory import Run
    from samestep.show.tracking import processes

    torch.set_num_threads(1)
    rank_zero_only.rank = int(os.environ.get("RANK", "0"))  # as an import in this process sets it
    processes.END_S = end_s
    if "full disk" in faults:
        whole = Run.append

        def append(run, record):
            if record["event"] == "metrics":
                raise samestep.UserError("The disk is full.")
            whole(run, record)

        Run.append = append

    class Kept(Logger):
        name = version = "kept"
        rows: list = []  # noqa: RUF012
        log_hyperparams = lambda *_: None  # noqa: E731

        def log_metrics(self, metrics, step=None):
            self.rows.append((step, dict(metrics)))

    patient = {"timeout_s": 600.0} | (more or {})
    logger = samestep.TrackerLogger(trackers, save_dir="runs", name="mine", **patient)
    how = {"accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", "1"))}
    how |= {f"enable_{part}": False for part in ("checkpointing", "progress_bar", "model_summary")}
    trainer = Trainer(max_epochs=epochs, logger=[Kept(), logger], log_every_n_steps=1, **how)
    module = make_module()(odd=4 if "in a step" in faults else None)
    try:
        trainer.fit(module)
        trainer.test(module, verbose=False)
    finally:
        logger.close()
    clients = ("comet_ml", "mlflow", "wandb", "tensorboard", "own_tracker")
    imported = [name for name in clients if name in sys.modules]
    weights = [p.tolist() for p in module.parameters()]
    done = {"imported": imported, "weights": weights, "directory": logger.log_dir}
    return SimpleNamespace(logged=Kept.rows, **done)


def fits(folder, *args, world_size=1, **kwargs):
    """Fit on some ranks to a good end; return what each saw, the run directory, what was said."""
    output = folder / f"output-{len(list(folder.glob('output-*')))}"
    values = run_ranks(partial(fit, **kwargs), world_size, output, str(folder), *args)
    said = [(output / f"output-{rank}.txt").read_text() for rank in range(world_size)]
    return values, folder / values[0].directory, said


def expected(logged):
    """Return what a tracker has to have of what was logged: (step, epoch, values), in order."""
    rows = (
        (step, row.get("epoch"), row.items() - {("epoch", row.get("epoch"))})
        for step, row in logged
    )
    return [(step, epoch, {k: v for k, v in row if math.isfinite(v)}) for step, epoch, row in rows]


def arrived(run, service="service"):
    lines = what(run, "metrics", service)
    return [(line["step"], line["epoch"], line["values"]) for line in lines]


def faulty(folder, faults):
    return Training(folder, folder, folder).faulty(faults)


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    (value,), run, _ = fits(tmp_path_factory.mktemp("untracked"), "none", {})
    assert not (run / "tracking").exists()
    return value


def test_two_ranks_have_one_run_with_what_the_trainer_logged_in_its_order(tmp_path):
    more = {"project": "odd ones", "tags": ("a", "b"), "workspace": "us"}
    key = {"MY_API_KEY": PLANTED}
    values, run, said = fits(tmp_path, (TRACKER,), key, more, world_size=2)
    first, second = values
    assert [path.name for path in run.parent.iterdir() if path.is_dir()] == [run.name]
    assert run.name.startswith("tracked-")
    assert len(first.logged) == 2 * (6 + 2) + 1
    assert arrived(run) == expected(first.logged)
    assert not (first.imported + second.imported), "the training imports no tracker"
    assert said[1] == "", "the other ranks are silent"
    assert said[0].count("own_tracker https://tracker.example/the-run") == 1
    (start,), (finish,) = what(run, "start"), what(run, "finish")
    assert (start["project"], start["name"], start["tags"]) == ("odd ones", "mine", ["a", "b"])
    assert start["workspace"] == "us"
    assert start["settings"]["lr"] == 0.1
    assert start["settings"]["layers"] == "(2, 1)"
    assert start["facts"].keys() >= {"versions.torch", "versions.lightning", "host"}
    assert finish["status"] == "completed"
    times = [line["time"] for line in what(run, "metrics")]
    assert times == sorted(times)
    # The planted key is nowhere, though it was logged as a hyperparameter.
    assert tomllib.loads((run / "settings.toml").read_text())["hyperparameters"]["api_key"] == "…"
    assert PLANTED not in said[0]
    assert not readers.files_with(PLANTED, run)


def test_whatever_trackers_do_the_training_is_the_same(tmp_path, untracked):
    """The other faults of test_following.py differ only for the tracker's process."""
    trackers = faulty(tmp_path, ["start:hang", "record:kill"])
    given, planted = [str(path) for path in trackers.values()], {"TRACKER_FAULT": "planted"}
    (value,), run, (said,) = fits(tmp_path, given, planted, {"timeout_s": 2.0})
    assert expected(value.logged) == expected(untracked.logged)
    assert value.weights == untracked.weights
    assert "Traceback" not in said
    for name, path in trackers.items():
        assert said.count(f"warning {name} failed: ") == 1, said
        assert f"samestep track {run.relative_to(tmp_path)} --to {path}" in said
    send(run, tmp_path, to=",".join(given))
    for name in trackers:
        assert arrived(run, name) == expected(value.logged), "once, whatever came before"


def test_the_training_does_not_wait_for_a_tracker_to_start(tmp_path):
    """Its start waits for the last record of the training: if that waited too, none would end."""
    (value,), run, _ = fits(tmp_path, TRACKER, {"TRACKER_FAULT": "start:wait"})
    assert arrived(run) == expected(value.logged)


def test_a_disk_that_is_full_is_warned_of_once_and_does_not_end_the_training(tmp_path, untracked):
    (value,), run, (said,) = fits(tmp_path, TRACKER, {}, faults=("full disk",))
    assert value.weights == untracked.weights
    assert said.count("warning TrackerLogger: ") == 1
    assert what(run, "finish")[0]["status"] == "completed"


def test_a_fit_that_fails_leaves_a_failed_run_and_its_own_error_and_waits_for_no_tracker(tmp_path):
    (hangs,) = faulty(tmp_path, ["finish:hang"]).values()
    told = ([TRACKER, str(hangs)], {"TRACKER_FAULT": "planted"})
    in_a_step = partial(fit, faults=("in a step",))
    ranks = start_ranks(in_a_step, 2, tmp_path / "out", str(tmp_path), *told)
    assert ranks.wait() == [1, 1]
    for rank in range(2):
        assert "'no_such_thing'" in ranks.printed(rank)
        assert ranks.printed(rank).count("Traceback") == 1
    (run,) = (path for path in (tmp_path / "runs" / "mine").iterdir() if path.is_dir())
    assert read_json(run / "result.json") == {"status": "failed", "steps": 3}
    tiny.until(lambda: bool(what(run, "start", "finish_hang")))
    (pid,) = children_of(run, "finish_hang")
    os.kill(pid, signal.SIGKILL)
    tiny.until(lambda: bool(what(run, "finish")))
    assert what(run, "finish")[0]["status"] == "failed"
    assert [row[0] for row in arrived(run)] == [0, 1, 2, 3]


def test_the_same_version_again_goes_on_with_the_same_tracker_run_each_step_once(tmp_path):
    _, run, _ = fits(tmp_path, TRACKER, {}, {"version": 7})
    assert run.name == "7"
    _, again, _ = fits(tmp_path, TRACKER, {}, {"version": 7}, epochs=3)
    assert again == run
    assert [line["known"] for line in what(run, "start")] == [None, "the run"]
    steps = [step for step, _, values in arrived(run) if "train_loss_step" in values]
    assert steps == list(range(36)), "the second began anew, and the trackers went on"
    tests = [step for step, _, values in arrived(run) if "test_loss" in values]
    assert tests == [24, 36]
    resumed = [r["resumed"] for r in tiny.all_records(run) if r["event"] == "start"]
    assert resumed == [False, True]


SCRIPT = """
import argparse, sys, warnings
warnings.simplefilter("ignore")
from samestep import TrackerLogger
logger = TrackerLogger(sys.argv[1], name="script")
logger.log_hyperparams(argparse.Namespace(lr=0.5, nested={"a": {1: 2}}, track_workspace="theirs"))
logger.log_metrics({"loss": 2.0})
logger.log_metrics({"loss": 1, "epoch": 0})
logger.log_hyperparams({"late": True})
if len(sys.argv) > 2: raise RuntimeError("their own")
logger.finalize("success")
"""


def script(folder, *arguments):
    done = typed("-c", SCRIPT, *arguments, folder=folder, **QUIET)
    (run,) = (path for path in (folder / "runs" / "script").iterdir() if path.is_dir())
    return done, run


@pytest.mark.slow
def test_without_a_close_it_is_closed_when_python_ends_as_completed_or_killed(tmp_path):
    done, run = script(tmp_path, TRACKER)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "own_tracker https://tracker.example/the-run\n"
    assert arrived(run) == [(1, None, {"loss": 2.0}), (2, 0, {"loss": 1.0})]
    (start,) = what(run, "start")
    assert start["settings"]["nested.a.1"] == 2
    settings = tomllib.loads((run / "settings.toml").read_text())
    assert settings["hyperparameters"]["late"] is True
    assert start["settings"]["track_workspace"] == "theirs"
    assert "track_workspace" not in settings, "samestep track would take it for its own"
    assert what(run, "finish")[0]["status"] == "completed"
    (tmp_path / "fails").mkdir()
    done, run = script(tmp_path / "fails", TRACKER, "fail")
    assert "RuntimeError: their own" in done.stderr
    assert what(run, "finish")[0]["status"] == "killed"


REFUSED = {"comt": "'comet'"}
REFUSED |= {x: f"TrackerLogger: {x}" for x in ("comet,comet", "nowhere.py")}


def test_a_mistake_is_refused_on_every_rank_and_a_missing_client_named(tmp_path, monkeypatch):
    from lightning.pytorch.utilities import rank_zero_only

    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        for trackers, words in REFUSED.items():
            with pytest.raises(samestep.UserError, match=re.escape(words)):
                samestep.TrackerLogger(trackers)
    for wrong, words in (({"project": "a/b"}, "project 'a/b'"), ({"timeout_s": 0}, "timeout")):
        with pytest.raises(samestep.UserError, match=f"TrackerLogger: {words}"):
            samestep.TrackerLogger("none", **wrong)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(samestep.UserError, match=r"comet_ml.*'samestep\[comet\]'"):
        samestep.TrackerLogger("comet")


def logged(trackers, folder, hyperparameters=None, **how):
    logger = samestep.TrackerLogger(trackers, save_dir=folder, **how)
    if hyperparameters:
        logger.log_hyperparams(hyperparameters)
    logger.log_metrics({"loss": 1.0})
    logger.finalize("success")
    logger.close()
    return Path(logger.log_dir)


def test_a_loggers_run_cannot_be_resumed_nor_written_by_two(tmp_path, refused):
    run = logged("none", tmp_path)
    assert "settings.toml" in refused("train", str(run), "--resume")
    assert read_json(run / "result.json")["status"] == "completed"
    one, other = (samestep.TrackerLogger("none", save_dir=tmp_path, version="same") for _ in "ab")
    one.log_metrics({"loss": 1.0}, step=1)
    with pytest.raises(samestep.UserError, match=r"same.* close\(\)"):
        other.log_metrics({"loss": 2.0}, step=1)
    one.close()
    other.log_metrics({"loss": 3.0}, step=2)
    other.close()
    metrics = [r for r in tiny.all_records(Path(one.log_dir)) if r["event"] == "metrics"]
    assert [r["values"]["loss"] for r in metrics] == [1.0, 3.0]


def test_steps_that_no_tracker_takes_are_warned_of_and_names_are_checked(tmp_path):
    said = []
    logger = samestep.TrackerLogger("none", save_dir=tmp_path, say=said.append)
    for ends in (3, 3, 2):
        for step in range(ends):
            logger.log_metrics({"loss": 1.0}, step=step)
        logger.finalize("success")
    logger.close()
    (line,) = said
    assert re.findall(r"step (\d+)", line) == ["0", "2"]
    assert "TrackerLogger" in line
    (start,) = what(logged(TRACKER, tmp_path, version="v", tags="first"), "start")
    assert start["tags"] == ["first"]
    for wrong in ({"name": "../up"}, {"name": "/abs"}, {"version": "a/../../b"}):
        with pytest.raises(samestep.UserError, match=re.escape(repr(*wrong.values()))):
            samestep.TrackerLogger("none", save_dir=tmp_path, **wrong)


def test_a_run_without_a_ledger_is_sent_to_the_project_that_it_was_to_go_to(tmp_path):
    run = logged("none", tmp_path, {"recipe": "their own word"}, name="cnn", version="v")
    send(run, tmp_path)
    (start,) = what(run, "start")
    assert start["project"] == "cnn"
    assert start["settings"] == {"recipe": "their own word"}
