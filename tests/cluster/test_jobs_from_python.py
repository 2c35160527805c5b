"""A job that Python submitted is awaited and cancelled, and gives its run or its ranks' error."""

import pytest

import samestep
from samestep import UserError
from tests.cluster.jobs import write_recipe
from tests.cluster.sandbox import WITHIN_S

BROKEN = """
import os
if os.environ["RANK"] == "1":
    raise ValueError("planted")
"""


@pytest.fixture
def here(sandbox, tmp_path, monkeypatch):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, sandbox.environment[name])
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


def test_a_job_gives_its_run_or_the_error_of_its_rank(here):
    (here / "broken.py").write_text(BROKEN)
    trained = samestep.submit("tiny.py", nodes=2, epochs=1)
    broken = samestep.submit("broken.py", nodes=2, restarts=0)
    assert trained.status()["state"] in ("PENDING", "RUNNING", "COMPLETED")
    assert trained.result(WITHIN_S).result["world_size"] == 2
    told = trained.status()
    assert (told["state"], told["training"]["status"]) == ("COMPLETED", "completed")
    with pytest.raises(UserError, match="1: ValueError: planted"):
        broken.result(WITHIN_S)
    assert broken.status()["state"] == "FAILED"


def test_a_cancelled_job_says_that_no_rank_started(here):
    held = samestep.submit("tiny.py", sbatch=["--hold"])
    assert held.status()["reason"] == "JobHeldUser"
    assert not held.wait(0.1, every_s=0.05)
    held.cancel()
    assert held.wait(WITHIN_S)
    assert (held.status()["state"], held.status()["training"]) == ("CANCELLED", None)
    with pytest.raises(UserError, match=r"CANCELLED.*no rank"):
        held.result()
