"""A job runs the code of its submit, whatever is edited while it waits or is requeued."""

import json
from pathlib import Path

import pytest

from tests.cluster.jobs import RECIPE, set_pace, submit
from tests.cluster.sandbox import wait_for
from tests.cluster.test_jobs import local_losses

SCRIPT = """
import sys, time
from pathlib import Path
import helper
told = ["old", helper.TEXT, Path("data.txt").read_text(), *sys.argv[1:], sys.path[0]]
print(*told, Path.cwd(), sep="|", flush=True)
while not Path("go").exists():
    time.sleep(0.1)
"""


@pytest.fixture
def held(sandbox):
    """Give a function that submits a job which waits until it is released."""
    return lambda folder, file, *words: submit(sandbox, folder, file, "--sbatch=--hold", *words)


def test_a_recipe_that_is_edited_while_its_job_waits_or_is_requeued_trains_as_submitted(
    sandbox, held, tmp_path
):
    recipe, beside = tmp_path / "tiny.py", tmp_path / "beside.py"
    recipe.write_text(RECIPE.replace("nn.Linear(4, 2)", "__import__('beside').net()"))
    net = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(4, 8), {}, {})\n"
    last = "nn.Linear(8, 2)"
    beside.write_text(net.format("nn.ReLU()", last))
    local = local_losses(tmp_path)
    set_pace(tmp_path, 0.3)
    job = held(tmp_path, "tiny.py", "--nodes", "2")
    beside.write_text(net.format("nn.Tanh()", last))
    recipe.write_text(recipe.read_text().replace('"seed": 3', '"seed": 4'))
    sandbox.run("scontrol", "release", job.job)
    job.wait_for_step(31)
    recipe.write_text("recipe = None\n")
    sandbox.run("scontrol", "requeue", job.job)
    set_pace(tmp_path, None)
    job.wait("COMPLETED")
    assert [loss for _, loss in job.losses()] == pytest.approx([one for _, one in local], rel=1e-5)
    assert any(record["event"] == "resume" for record in job.all_records())
    more = submit(sandbox, tmp_path, str(job.run), "--", "--epochs", "3")
    sandbox.run("scontrol", "release", more.job)  # it asks for what the job before asked for
    more.wait("COMPLETED")
    assert more.losses()[-1][0] == 90


def test_a_script_that_is_edited_runs_as_submitted_where_the_command_was_typed(
    sandbox, held, tmp_path
):
    code = tmp_path / "code"
    code.mkdir()
    (code / "mine.py").write_text(SCRIPT)
    (code / "helper.py").write_text("TEXT = 'old helper'\n")
    (tmp_path / "data.txt").write_text("data")
    job = held(tmp_path, "code/mine.py", "--", "--flag", "a b")
    (code / "mine.py").write_text("print('EDITED')\n")
    (code / "helper.py").unlink()
    sandbox.run("scontrol", "release", job.job)
    wait_for(lambda: "old|" in job.log)
    sandbox.run("scontrol", "requeue", job.job)
    wait_for(lambda: job.log.count("old|") == 2)
    (tmp_path / "go").touch()
    job.wait("COMPLETED")
    told = ("old", "old helper", "data", "--flag", "a b", str(job.run / "code"), str(tmp_path))
    assert job.log.count("|".join(told)) == 2


def test_an_edited_file_is_refused_at_the_start_of_a_job_without_a_copy(sandbox, held, tmp_path):
    (tmp_path / "mine.py").write_text("print('it runs')\n")
    jobs = [held(tmp_path, "mine.py", "--no-snapshot", *more) for more in ((), ("--allow-edit",))]
    (tmp_path / "mine.py").write_text("print('it runs edited')\n")
    for job in jobs:
        sandbox.run("scontrol", "release", job.job)
    jobs[0].wait("FAILED")
    assert sandbox.field(jobs[0].job, "ExitCode") == "2:0"
    assert f"{tmp_path / 'mine.py'}: FAILED" in jobs[0].log
    assert "it runs" not in jobs[0].log
    jobs[1].wait("COMPLETED")
    assert "it runs edited" in jobs[1].log
    assert json.loads((jobs[0].run / "job.json").read_text())["snapshot"] is False
    assert not Path(jobs[0].run, "code").exists()
