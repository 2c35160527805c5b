"""`samestep runs` as a user runs it."""

import json
import sys

import pytest

from tests.command_line import call
from tests.reporting.made_runs import write_run
from tests.run.test_summary import damaged_folder

KEYS = {
    *("name", "run_dir", "recipe", "state", "reason", "metric", "mode", "value", "seconds"),
    *("epochs", "steps", "world_size", "started", "losses"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, recipe in (("one", "toy"), ("two", "spiral")):
        write_run(tmp_path / "runs" / name, recipe=recipe)
    return tmp_path / "runs"


def listed(capfd, *arguments):
    assert call("runs", *arguments, "--json") == 0
    return json.loads(capfd.readouterr().out)


def test_the_runs_of_a_folder_are_listed_by_default_those_of_runs(folder, capfd):
    assert call("runs") == 0
    heading, *lines = capfd.readouterr().out.splitlines()
    assert heading.split()[0] == "run"
    assert {line.split()[0] for line in lines} == {"one", "two"}
    found = listed(capfd, str(folder), "--sort", "name")
    assert [run["name"] for run in found] == ["one", "two"]
    assert all(set(run) == KEYS for run in found)
    assert found[0]["state"] == "completed"
    assert found[0]["run_dir"] == str(folder / "one")


def test_one_recipe_may_be_asked_for(folder, capfd):
    assert [run["name"] for run in listed(capfd, "--recipe", "spiral")] == ["two"]
    assert listed(capfd, "--recipe", "mnist") == []
    assert call("runs", "--recipe", "mnist") == 0
    assert "spiral, toy" in capfd.readouterr().out


def test_where_there_is_no_run_yet_it_says_how_to_begin_one(here, capfd):
    assert listed(capfd) == []
    assert call("runs") == 0
    assert "samestep train spiral" in capfd.readouterr().out
    (here / "empty").mkdir()
    assert listed(capfd, "empty") == []


@pytest.mark.parametrize(
    ("words", "told"),
    [("runs/one", "samestep runs runs"), ("nothing", "nothing"), ("--sort size", "metric")],
)
def test_an_unknown_order_and_what_is_no_folder_of_runs_are_refused(folder, refused, words, told):
    assert told in refused("runs", *words.split())


def test_on_a_terminal_the_table_fits_it(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "runs"
    damaged = damaged_folder(folder)
    found = listed(capsys, str(folder))
    assert {run["name"] for run in found if run["state"] == "damaged"} == damaged
    write_run(folder / ("a-run-with-a-name-that-is-longer-than-any-that-train-gives" * 2))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call("runs", str(folder)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, "the damaged ones are counted in a line"
    assert max(map(len, lines)) <= 80
    assert "completed" in lines[1]
