"""What a model has to beat: measured by rank 0, once, when a run ends."""

import signal

import pytest

from tests import tiny
from tests.command_line import read_json

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


def measured(folder, body, *flags, monkeypatch, world_size=1):
    monkeypatch.chdir(folder)
    path, recipe = folder / "run", recipe_with(folder, body)
    printed = tiny.trained(recipe, path, "--epochs", "1", *flags, on=world_size)
    return path, read_json(path / "result.json"), printed


def test_baselines_are_measured_once_while_the_other_ranks_wait(tmp_path, monkeypatch):
    body = f"threading.Event().wait(8); {ROWS}"  # longer than a collective may take
    flags = ("--timeout-s", "6")
    path, result, printed = measured(tmp_path, body, *flags, monkeypatch=monkeypatch, world_size=2)
    assert result["baselines"] == {"constant": {"accuracy": 0.5, "other": None}}
    (record,) = tiny.events(path, "baselines")
    assert record["values"]["trees"] == "left out"
    assert (tmp_path / "calls.txt").read_text() == "called\n"
    assert "constant" in printed
    assert "left out" in printed


@pytest.mark.parametrize(
    ("body", "told"), [("return {}['x']", "KeyError"), ("return {'constant': 5}", "metric")]
)
def test_baselines_that_fail_are_told_and_the_run_is_whole(tmp_path, monkeypatch, body, told):
    _, result, printed = measured(tmp_path, body, monkeypatch=monkeypatch)
    assert result["status"] == "completed"
    assert "baselines" not in result
    assert told in printed
    assert "Traceback" not in printed


STOP_ONCE = f"""if not os.path.exists("stopped.txt"):
        Path("stopped.txt").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    {ROWS}"""


def test_a_signal_does_not_wait_for_baselines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    command = ("--run-dir", str(path), "--epochs", "1")
    ranks = tiny.start(recipe_with(tmp_path, STOP_ONCE), *command, folder=tmp_path / "outputs")
    assert ranks.wait() == [128 + signal.SIGTERM], ranks.output()
    assert read_json(path / "result.json")["status"] == "stopped"
    tiny.resumed(path)
    assert "constant" in read_json(path / "result.json")["baselines"]
