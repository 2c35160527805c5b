"""What `samestep slurm status` shows of many jobs fits the terminal, and a pipe gets it whole."""

import io

import pytest
from rich.console import Console

from samestep.commands.slurm.status import jobs_table
from samestep.slurm.queue import JobAndRun, QueuedJob
from samestep.slurm.training_progress import Progress

JOB = QueuedJob(
    job=123456,
    name="a-name-as-long-as-people-give-them-to-their-experiments",
    user="me",
    state="COMPLETED",
    reason="None",
    nodes="node[1-2]",
    restarts=12,
    elapsed_s=172_812,
    limit_s=None,
    starts_at="Unknown",
    exit_code="0:0",
    log=None,
    run=None,
)
PROGRESS = Progress(step=12_345, total_steps=99_999, loss=2.3456, eta_s=90_000, starts=12)


def shown(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(jobs_table([(JobAndRun(job=JOB), PROGRESS)]))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100])
def test_on_a_narrow_terminal_the_name_alone_is_cut_and_each_job_is_one_line(width):
    [line] = [line for line in shown(width) if line.strip().startswith("123456")]
    assert "a-name" in line
    assert "…" in line
    for whole in ("COMPLETED", "48:00:12", "12,345 12%", "2.3456"):
        assert whole in line
    assert all(len(line) <= width for line in shown(width))


def test_a_pipe_gets_everything():
    assert JOB.name in "".join(shown(10_000))
