"""`samestep report`, `watch`, `runs` and `compare` as a user runs them."""

import json
import os
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.base.run.records import read_records
from tests import tiny
from tests.command_line import call, one_message, start
from tests.processes import TIMEOUT_S
from tests.reporting.made_runs import write_run
from tests.reporting.pages import ReadPage
from tests.run.test_summary import damaged_folder
from tests.tiny import until


def test_the_page_of_a_run_is_in_its_directory_and_that_of_several_is_here(here, output_of):
    one, other = (str(write_run(here.parent / name)) for name in ("one", "other"))
    assert output_of("report", one) == f"{one}/report.html\n"
    assert "loss" in ReadPage(Path(one, "report.html").read_text()).charts
    assert call("report", one) == 0, "it is written anew"
    assert output_of("report", one, other, "--target", "0.6") == "report.html\n"
    assert (here / "report.html").is_file()


@pytest.mark.parametrize("browser", [True, False])
def test_it_is_written_where_asked_for_and_opened(tmp_path, output_of, monkeypatch, browser):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or browser)
    file = tmp_path / "my page.html"
    run = write_run(tmp_path / "run")
    assert output_of("report", run, "-o", file, "--open") == f"{file}\n"
    assert opened == [file.as_uri()]
    assert file.is_file()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, refused, monkeypatch):
    run = write_run(tmp_path / "run")

    def refuse(path, text):
        denied = PermissionError(13, "Permission denied", str(path))
        raise UserError("as files.py says it") from denied

    with monkeypatch.context() as patch:
        patch.setattr("samestep.show.reporting.page.write_text", refuse)
        assert "-o report.html" in refused("report", str(run))
    assert call("report", str(run), "-o", str(tmp_path / "page.html")) == 0


def test_it_awaits_its_run_prints_its_address_serves_the_page_and_ends_on_ctrl_c(tmp_path):
    run = tmp_path / "run"
    watching = start("watch", str(run), "--port", "0", folder=tmp_path / "output")
    (process,) = watching.processes

    def lines() -> list[str]:
        file = watching.folder / "output-0.txt"
        return file.read_text().splitlines() if file.exists() else []

    until(lambda: len(lines()) == 1, watching)
    write_run(run, epochs=1)
    until(lambda: len(lines()) == 2, watching)
    waits, address = lines()
    assert "60 s" in waits
    assert address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
        assert answer.status == 200
    os.kill(process.pid, signal.SIGINT)
    assert watching.wait() == [130]
    assert lines() == [waits, address]


def test_a_port_that_is_taken_and_what_is_no_run_are_refused(tmp_path, refused, capfd, monkeypatch):
    run = str(write_run(tmp_path / "run", epochs=1))
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in ("-1", "65536", str(other.getsockname()[1])):
            assert port in refused("watch", run, f"--port={port}")
    monkeypatch.setattr("samestep.shell.commands.watch._PATIENCE_S", 0.0)
    code = call("watch", str(tmp_path / "nowhere"))
    waits, message = capfd.readouterr().err.splitlines(keepends=True)
    assert "nowhere" in waits
    assert "nowhere" in one_message(code, message)


@pytest.mark.parametrize(("kind", "says"), [("recipe", "not started"), ("script", "script")])
def test_a_jobs_run_without_records_says_what_tells(slurm, here, capfd, monkeypatch, kind, says):
    monkeypatch.setattr("samestep.shell.commands.watch._PATIENCE_S", 0.0)
    run = here / "run"
    run.mkdir()
    (run / "job.sbatch").write_text(f"--kind {kind}")
    slurm.add(5, run)
    for name in ("5", str(run)):
        code = call("watch", name)
        _, message = capfd.readouterr().err.splitlines(keepends=True)
        message = one_message(code, message)
        assert says in message
        assert f"samestep slurm status {run}" in message


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


def test_one_rank_and_two_are_shown_to_be_the_same_training(uninterrupted, output_of, tmp_path):
    run = tmp_path / "run"
    tiny.trained(tiny.write_recipe(tmp_path), run, "--max-steps", "30", on=2)
    tiny.resumed(run, "--max-steps", "66")
    compare = ("compare", uninterrupted, run)
    found = json.loads(output_of(*compare, "--metric", "loss", "--json"))
    (same,) = found["same_training"]
    assert same["verdict"] in ("equal", "rounding")
    assert same["steps"] == 66
    assert same["largest"] < 1e-12
    assert not any(difference["another_training"] for difference in found["settings"].values())
    (problem,) = found["runs"][1]["problems"]
    assert "2, then 1 ranks" in problem
    # The phases of the measured epochs add up to their seconds.
    for speed, phases in zip(found["throughput"], found["phases_ms_per_step"], strict=True):
        # The clocks of both are read one after the other, and an epoch takes 20 ms: it is seen when
        # the system runs something else between the two readings.
        assert sum(phases.values()) == pytest.approx(speed["ms_per_step"], rel=0.02, abs=0.2)
    epochs = [r for r in read_records(uninterrupted) if r["event"] == "evaluation"]
    assert found["by_samples"]["as_recorded"]
    assert found["by_samples"]["values"][0][0] == epochs[0]["loss"]
    assert found["by_samples"]["places"][0] == epochs[0]["epoch"] * 131
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    output_of(*compare, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
