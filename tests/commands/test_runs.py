"""`samestep runs` as a user runs it."""

import json
import sys

import pytest

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


def listed(output_of, *arguments):
    return json.loads(output_of("runs", *arguments, "--json"))


def test_runs_of_a_folder_or_of_one_recipe_are_listed_by_default_those_of_runs(folder, output_of):
    heading, *lines = output_of("runs").splitlines()
    assert heading.split()[0] == "run"
    assert {line.split()[0] for line in lines} == {"one", "two"}
    found = listed(output_of, str(folder), "--sort", "name")
    assert [run["name"] for run in found] == ["one", "two"]
    assert all(set(run) == KEYS for run in found)
    assert found[0]["state"] == "completed"
    assert found[0]["run_dir"] == str(folder / "one")
    assert [run["name"] for run in listed(output_of, "--recipe", "spiral")] == ["two"]
    assert listed(output_of, "--recipe", "mnist") == []
    assert "spiral, toy" in output_of("runs", "--recipe", "mnist")


def test_where_there_is_no_run_yet_it_says_how_to_begin_one(here, output_of):
    assert listed(output_of) == []
    assert "samestep train spiral" in output_of("runs")
    (here / "empty").mkdir()
    assert listed(output_of, "empty") == []


@pytest.mark.parametrize(
    ("words", "told"),
    [("runs/one", "samestep runs runs"), ("nothing", "nothing"), ("--sort size", "metric")],
)
def test_an_unknown_order_and_what_is_no_folder_of_runs_are_refused(folder, refused, words, told):
    assert told in refused("runs", *words.split())


def test_on_a_terminal_the_table_fits_it(tmp_path, output_of, monkeypatch):
    folder = tmp_path / "runs"
    damaged = damaged_folder(folder)
    found = listed(output_of, folder)
    assert {run["name"] for run in found if run["state"] == "damaged"} == damaged
    write_run(folder / ("a-run-with-a-name-that-is-longer-than-any-that-train-gives" * 2))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = output_of("runs", folder).splitlines()
    assert len(lines) == 3, "the damaged ones are counted in a line"
    assert max(map(len, lines)) <= 80
    assert "completed" in lines[1]
