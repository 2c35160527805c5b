"""`samestep watch`: it serves until it is interrupted, and refuses what cannot be served."""

import os
import signal
import socket
import urllib.request

import pytest

from tests.command_line import call, one_message, start
from tests.processes import TIMEOUT_S
from tests.reporting.made_runs import write_run
from tests.slurm.fake_slurm import install
from tests.tiny import until


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


def test_a_port_that_is_taken_or_out_of_range_is_refused(tmp_path, refused):
    run = str(write_run(tmp_path / "run", epochs=1))
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in ("-1", "65536", str(other.getsockname()[1])):
            assert port in refused("watch", run, f"--port={port}")


def test_what_is_no_run_is_refused_before_anything_is_served(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("samestep.commands.watch._PATIENCE_S", 0.0)
    code = call("watch", str(tmp_path / "nowhere"))
    waits, message = capfd.readouterr().err.splitlines(keepends=True)
    assert "nowhere" in waits
    assert "nowhere" in one_message(code, message)


@pytest.mark.parametrize(("kind", "says"), [("recipe", "not begun"), ("script", "script")])
def test_a_jobs_run_without_records_is_refused_with_the_commands_that_tell_of_it(
    tmp_path, capfd, monkeypatch, kind, says
):
    monkeypatch.setattr("samestep.commands.watch._PATIENCE_S", 0.0)
    fake = install(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(fake.folder))
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.sbatch").write_text(f"--kind {kind}")
    fake.add(5, run)
    for name in ("5", str(run)):
        code = call("watch", name)
        _, message = capfd.readouterr().err.splitlines(keepends=True)
        message = one_message(code, message)
        assert says in message
        assert f"samestep slurm status {run}" in message
