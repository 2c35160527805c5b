"""`samestep watch`: it serves until it is interrupted, and refuses what cannot be served."""

import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests.command_line import call, one_message
from tests.processes import TIMEOUT_S
from tests.reporting.made_runs import write_run
from tests.slurm.fake_slurm import install


def test_it_prints_its_address_serves_the_page_and_ends_on_ctrl_c(tmp_path):
    run = write_run(tmp_path / "run", epochs=1)
    command = [sys.executable, "-m", "samestep", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as w:
        try:
            address = w.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                assert answer.status == 200
            w.send_signal(signal.SIGINT)
            assert w.wait(TIMEOUT_S) == 130
            assert w.stderr.read() == ""
        finally:
            w.kill()


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_out_of_range_is_refused(tmp_path, capfd, port):
    code = call("watch", str(write_run(tmp_path / "run", epochs=1)), f"--port={port}")
    assert "--port" in one_message(code, capfd.readouterr().err)


def test_a_port_that_is_taken_is_refused(tmp_path, capfd):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code = call("watch", str(write_run(tmp_path / "run", epochs=1)), "--port", port)
    assert port in one_message(code, capfd.readouterr().err)


def test_a_run_that_begins_a_moment_later_is_awaited(tmp_path):
    command = [sys.executable, "-m", "samestep", "watch", "run", "--port", "0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as w:
        try:
            assert "60 s" in w.stderr.readline()
            write_run(tmp_path / "run", epochs=1)
            assert w.stdout.readline().startswith("http://127.0.0.1:")
        finally:
            w.kill()


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
