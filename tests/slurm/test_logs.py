"""What `samestep slurm logs` shows of a log that ranks share, also while it grows."""

import os
from pathlib import Path

import pytest

from samestep.cli import main
from samestep.commands.slurm import logs
from samestep.slurm.queue import parse_job


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

    def find(number):
        asked.append(clock.now)
        return job(state if clock.now < 60 else "COMPLETED")

    monkeypatch.setattr(logs, "find_job", find)
    logs._show({tmp_path / "log": None}, job(state))
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
    logs._show({log: 3}, job("RUNNING"))
    assert capsys.readouterr().out == "one\ntwö\nlast, torn"


@pytest.fixture
def script_run(slurm, tmp_path):
    """Give the run of a script of the user's, with a log; its job's script is left to write."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "slurm-5.out").write_text("samestep: job 5\n0: a\n1: b\n")
    return run


@pytest.mark.parametrize("launcher", ["srun --label x.py", "torchrun \\\n  --rdzv-backend=c10d"])
def test_a_rank_of_a_script_has_its_lines(script_run, capsys, launcher):
    (script_run / "job.sbatch").write_text(f"{launcher}\n")
    logs.main([str(script_run), "--rank", "1"])
    assert capsys.readouterr().out == "b\n"
    logs.main([str(script_run)])
    assert capsys.readouterr().out == "samestep: job 5\n0: a\n1: b\n"
    logs.main([str(script_run), "--rank", "0"])
    assert capsys.readouterr().out == "a\n"
    assert main(["slurm", "logs", str(script_run), "--rank", "first"]) == 2


def test_all_ranks_of_a_training_are_shown_with_their_labels(script_run, capsys):
    (script_run / "settings.toml").touch()
    (script_run / "slurm-5.out").write_text("zero\n")
    for rank in (1, 10, 2):
        (script_run / f"rank-{rank}.log").write_text(f"is {rank}\n")
    logs.main([str(script_run), "--rank", "all"])
    assert capsys.readouterr().out == "0: zero\n1: is 1\n2: is 2\n10: is 10\n"
    logs.main([str(script_run), "--rank", "0"])
    assert capsys.readouterr().out == "zero\n"


def test_lines_that_are_longer_than_the_terminal_are_broken_between_words():
    folded = logs._folded(f"short\n{'word ' * 30}\nlast, torn", 80)
    assert max(map(len, folded.splitlines())) <= 80
    assert folded.split() == ["short", *["word"] * 30, "last,", "torn"]
    assert folded.endswith("\nlast, torn")
    assert logs._folded("x" * 100 + "\n", 80) == "x" * 100 + "\n"
