"""`samestep check --here` under srun, on two nodes."""

import json
import subprocess

from tests.checking.planted import BASE, planted

WITH_OWN_PORT = (
    '    dist.init_process_group("gloo")\n',
    """\
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo")
""",
)


def test_the_ranks_of_a_job_on_two_nodes_are_checked_together(sandbox, tmp_path):
    text = planted(WITH_OWN_PORT, ("        sampler.set_epoch(epoch)\n", ""), base=BASE)
    (tmp_path / "train.py").write_text(text)
    said = subprocess.run(
        ("srun", "-N2", "--ntasks-per-node=1", "samestep", "check", "train.py", "--here", "--json"),
        env=sandbox.environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    findings = json.loads(said.stdout)["findings"]
    assert [finding["code"] for finding in findings] == ["SS103"], said.stderr
    assert said.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
