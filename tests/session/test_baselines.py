"""What a model has to beat: measured by rank 0, once, when a run ends."""

import json
import signal

import pytest

from tests import tiny

MORE = """
import os, signal, threading
from dataclasses import replace
from pathlib import Path

def baselines(options):
    with Path("calls.txt").open("a") as file:
        file.write("called\\n")
    {body}

recipe = replace(recipe, baselines=baselines)
"""
ROWS = """return {"constant": {"accuracy": 0.5, "other": float("nan")}, "trees": "left out"}"""


def recipe_with(folder, body):
    return tiny.write_recipe(folder, tiny.RECIPE + MORE.replace("{body}", body))


def train(folder, body, *flags, monkeypatch, world_size=1):
    """Train with baselines; return the run, its result, and what was printed."""
    monkeypatch.chdir(folder)
    path, recipe = folder / "run", recipe_with(folder, body)
    printed = tiny.trained(recipe, path, "--epochs", "1", *flags, on=world_size)
    return path, json.loads((path / "result.json").read_text()), printed


@pytest.mark.parametrize("world_size", [1, 2])
def test_baselines_are_measured_once_and_kept_with_the_result(tmp_path, monkeypatch, world_size):
    where = {"monkeypatch": monkeypatch, "world_size": world_size}
    path, result, printed = train(tmp_path, ROWS, **where)
    assert result["baselines"] == {"constant": {"accuracy": 0.5, "other": None}}
    (record,) = (r for r in tiny.all_records(path) if r["event"] == "baselines")
    assert record["values"]["trees"] == "left out"
    assert (tmp_path / "calls.txt").read_text() == "called\n"
    assert "constant" in printed
    assert "left out" in printed


def test_the_other_ranks_wait_longer_than_a_collective_may_take(tmp_path, monkeypatch):
    body = f"threading.Event().wait(6); {ROWS}"  # longer than the timeout is what is tested
    flags = ("--timeout-s", "4")
    _, result, _ = train(tmp_path, body, *flags, monkeypatch=monkeypatch, world_size=2)
    assert "constant" in result["baselines"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return {}['x']", "KeyError"),
        ("return {'constant': 5}", "metric"),
        ("return type('Own', (dict,), {'items': lambda self: 1 / 0})()", "metric"),
    ],
)
def test_baselines_that_fail_are_told_and_the_run_is_whole(tmp_path, monkeypatch, body, told):
    _, result, printed = train(tmp_path, body, monkeypatch=monkeypatch)
    assert result["status"] == "completed"
    assert "baselines" not in result
    assert told in printed
    assert "Traceback" not in printed


STOP_ONCE = f"""if not os.path.exists("stopped.txt"):
        Path("stopped.txt").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    {ROWS}"""


def test_a_signal_does_not_wait_for_baselines_and_the_run_measures_them_later(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    command = ("--run-dir", str(path), "--epochs", "1")
    ranks = tiny.start(recipe_with(tmp_path, STOP_ONCE), *command, folder=tmp_path / "outputs")
    assert ranks.wait() == [128 + signal.SIGTERM], ranks.output()
    assert json.loads((path / "result.json").read_text())["status"] == "stopped"
    tiny.resumed(path)
    assert "constant" in json.loads((path / "result.json").read_text())["baselines"]
