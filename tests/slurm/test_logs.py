"""What `samestep slurm logs` shows of a log that ranks share, also while it grows."""

import os
from pathlib import Path

import pytest

from samestep.commands.slurm import logs
from samestep.errors import UserError
from samestep.slurm.queue import parse_job
from tests.slurm.fake_slurm import install


class Clock:
    """Time that passes by sleeping alone; what is planned for a moment happens then."""

    def __init__(self) -> None:
        self.now, self.plan = 0.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.plan and self.plan[0][0] <= self.now:
            self.plan.pop(0)[1]()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(logs, "time", clock)
    return clock


def job(state: str):
    return parse_job(f"JobId=5 JobName=x UserId=ada({os.getuid()}) JobState={state}")


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_following_asks_the_controller_every_few_seconds(tmp_path, monkeypatch, clock, state):
    asked = []
    monkeypatch.setattr(
        logs,
        "find_job",
        lambda number: asked.append(clock.now) or job(state if clock.now < 60 else "COMPLETED"),
    )
    logs._show(tmp_path / "log", "", job(state))
    assert 10 <= len(asked) <= 13, "a minute of waiting"


def test_a_followed_line_is_shown_once_it_is_whole(tmp_path, monkeypatch, clock, capsys):
    log = tmp_path / "log"
    log.write_bytes(b" 3: one\n 3: t")
    two = " 3: twö\n".encode()
    clock.plan = [
        (1, lambda: append(log, two[5:7])),  # to the middle of the ö
        (2, lambda: append(log, two[7:])),
        (3, lambda: append(log, b"11: no\n 3: last, torn")),
    ]
    monkeypatch.setattr(logs, "find_job", lambda _: job("COMPLETED"))
    logs._show(log, "3", job("RUNNING"))
    assert capsys.readouterr().out == "one\ntwö\nlast, torn"


def test_labels_are_padded_from_eleven_tasks_on():
    text = " 3: a\n13: b\n 3: 13: c\rd\n3: e\nsamestep: 3: f\n"
    assert logs._labelled(text, "3") == "a\n13: c\rd\ne\n"
    assert logs._labelled(text, "13") == "b\n"


@pytest.fixture
def script_run(tmp_path, monkeypatch):
    """Give the run of a script of the user's, with a log; its job's script is left to write."""
    fake = install(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(fake.folder))
    run = tmp_path / "run"
    run.mkdir()
    (run / "slurm-5.out").write_text("samestep: job 5\n0: a\n1: b\n")
    return run


def test_a_rank_of_a_torchrun_script_cannot_be_told_apart(script_run, capsys):
    (script_run / "job.sbatch").write_text("torchrun \\\n    --rdzv-backend=c10d\n")
    with pytest.raises(UserError, match=r"--rank .* --launcher torchrun"):
        logs.main([str(script_run), "--rank", "1"])
    logs.main([str(script_run)])
    assert capsys.readouterr().out == "samestep: job 5\n0: a\n1: b\n"


def test_a_rank_of_a_script_under_srun_has_its_lines(script_run, capsys):
    (script_run / "job.sbatch").write_text("srun --label torchrun-like.py\n")
    logs.main([str(script_run), "--rank", "1"])
    assert capsys.readouterr().out == "b\n"
