"""The sandbox is a real Slurm: it runs, requeues, preempts, loses nodes, and leaves nothing."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import samestep
from samestep.base.errors import UserError
from samestep.cluster.slurm import sandbox_daemons as daemons
from samestep.cluster.slurm.sandbox_cluster import down, status, up
from samestep.cluster.slurm.sandbox_daemons import find_processes
from samestep.shell.cli import main
from tests.cluster.sandbox import RunningSandbox, wait_for
from tests.processes import TIMEOUT_S, env

SAY_WHERE = 'echo "$SLURM_PROCID $SLURMD_NODENAME $MASTER_ADDR"'


def test_four_tasks_run_on_two_nodes_that_meet_on_this_machine_or_where_they_are_told(sandbox):
    said = sandbox.run("srun", "-N2", "--ntasks-per-node=2", "bash", "-c", SAY_WHERE)
    places = [f"{rank} node{1 + rank // 2} 127.0.0.1" for rank in range(4)]
    assert sorted(said.splitlines()) == places
    said = sandbox.run("srun", "-n1", "bash", "-c", SAY_WHERE, MASTER_ADDR="10.0.0.9")
    rank, _, address = said.split()  # node1 may still be clearing up after the job before
    assert (rank, address) == ("0", "10.0.0.9")
    assert "NodeAddr=127.0.0.1" in sandbox.run("scontrol", "show", "node", "node2")


def test_after_a_crash_down_leaves_no_process_and_up_works_again(empty, tmp_path):
    up(empty, nodes=2, cpus=2)
    own = RunningSandbox(folder=empty, nodes=("node1", "node2"))
    # One process keeps its environment, one drops it, one leaves its parent too.
    own.submit(
        tmp_path,
        "sleep 30117 &\nenv -i sleep 30227 &\n"
        "srun setsid bash -c 'trap : TERM; sleep 30337' &\nwait",
        "-N2",
        "-n2",
    )
    wait_for(lambda: _sleepers() >= {"30117", "30227", "30337"})
    for process in find_processes(empty):
        if process.name in ("slurmctld", "munged"):
            os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: status(empty).daemons["munged"] is None)
    with pytest.raises(UserError, match=r"munged, slurmctld .*sandbox down"):
        up(empty, nodes=2)
    assert down(empty)
    assert not _sleepers() & {"30117", "30227", "30337"}
    assert not find_processes(empty)
    assert not empty.exists()
    assert up(empty, nodes=1).is_up


def test_down_spares_files_and_processes_of_the_users_own(empty, monkeypatch):
    for name, value in {"CONF": "/nowhere", "JOB_ID": "7", "PROCID": "1", "NTASKS": "9"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)  # of another cluster: they do not matter
    assert up(empty, nodes=1).is_up
    waits = "import signal; print(1, flush=True); signal.pause()"
    shell_of_salloc = {"SLURM_CONF": f"{empty}/slurm.conf", "SLURM_JOB_ID": "1"}
    bystander = subprocess.Popen(
        [sys.executable, "-c", waits, f"{empty}/slurm.conf"],
        env=os.environ | shell_of_salloc,
        stdout=subprocess.PIPE,
    )
    with bystander:
        assert bystander.stdout.readline() == b"1\n"
        # A stale file with the id of somebody else's process must not matter.
        (empty / "state" / "slurmctld.pid").write_text(f"{bystander.pid}\n")
        (empty / "slurm-1.out").write_text("mine")
        down(empty)
        assert bystander.poll() is None
        bystander.kill()
    assert [path.name for path in empty.iterdir()] == ["slurm-1.out"]


def test_a_second_up_is_refused_and_shows_the_line(sandbox):
    with pytest.raises(UserError, match="2 nodes") as caught:
        up(sandbox.folder, nodes=3)
    assert f"\nexport SLURM_CONF={sandbox.folder}/slurm.conf\n" in str(caught.value)
    assert status(sandbox.folder).is_up


def test_a_sandbox_that_cannot_be_is_refused_and_leaves_nothing(empty, monkeypatch):
    for numbers in ({"nodes": 0}, {"nodes": 2, "cpus": 0}):
        with pytest.raises(UserError, match="--nodes 1"):
            up(empty, **numbers)
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        without.setattr(daemons, "_ADMIN_FOLDERS", "/nowhere")
        with pytest.raises(UserError, match=r"munged, slurmctld.*slurm-wlm munge"):
            up(empty, nodes=1)
    assert not empty.exists()
    (empty / "state").mkdir(parents=True)  # a folder with other files
    with pytest.raises(UserError, match="--dir"):
        up(empty, nodes=1)
    assert not down(empty)
    assert (empty / "state").exists()


def pose_as(monkeypatch, folder: Path, program: str, script: str) -> None:
    fake = folder / "bin" / program
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(("name", "daemon"), [("slurmd", "node1"), ("slurmctld", "slurmctld")])
def test_a_daemon_that_fails_is_named_with_its_log(empty, tmp_path, monkeypatch, name, daemon):
    pose_as(monkeypatch, tmp_path, name, "echo the disk is on fire >&2\nexit 3")
    with pytest.raises(UserError, match=f"{name} .* 3") as caught:
        up(empty, nodes=2)
    assert f"{daemon} " in str(caught.value)
    assert str(caught.value).endswith("\n  the disk is on fire")
    assert not find_processes(empty)


def test_a_node_that_never_comes_is_named_and_nothing_runs_on(empty, tmp_path, monkeypatch):
    pose_as(monkeypatch, tmp_path, "slurmd", "echo I would rather not")
    monkeypatch.setattr("samestep.cluster.slurm.sandbox_cluster._IDLE_WITHIN_S", 0.5)
    with pytest.raises(UserError, match="node1 ") as caught:
        up(empty, nodes=1)
    assert str(caught.value).count("I would rather not") == 1
    assert not find_processes(empty)


def test_the_command_prints_the_line_alone_if_told_and_its_exit_codes_say_what_is(empty, capsys):
    at = ["--dir", str(empty)]
    line = f"export SLURM_CONF={empty}/slurm.conf"
    assert main(["slurm", "sandbox", "status", *at]) == 1
    assert str(empty) in capsys.readouterr().out
    assert main(["slurm", "sandbox", "up", "--nodes", "1", "--quiet", *at]) == 0
    assert capsys.readouterr().out == f"{line}\n"
    assert main(["slurm", "sandbox", "status", *at]) == 0
    shown = capsys.readouterr().out
    assert line in shown.splitlines()
    (node,) = [row.split()[:2] for row in shown.splitlines() if row.startswith("node")]
    assert node == ["node1", "idle"]
    assert main(["slurm", "sandbox", "down", *at]) == 0
    assert main(["slurm", "sandbox", "down", *at]) == 0
    assert str(empty) in capsys.readouterr().out
    assert main(["slurm", "sandbox", "up", "--nodes", "1", *at]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert line in shown
    assert shown[-1] == f"samestep slurm sandbox down --dir {empty}"


def test_the_sandbox_of_an_ordinary_user_needs_no_root(tmp_path_factory):
    if os.getuid():
        pytest.skip("this user is no root: every other test here shows the same")
    packages = Path(shutil.__file__).parent  # of the standard library
    python = Path("/usr/bin/python3.11") if str(packages).startswith("/root") else sys.executable
    if not Path(python).exists():
        pytest.skip(f"an ordinary user cannot read {sys.executable}; apt install python3.11")
    nobody = pwd.getpwnam("nobody")
    home = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    site = Path(pytest.__file__).parent.parent
    source = Path(samestep.__file__).parents[1]
    script = f"""
        set -e
        cd {home}
        sandbox() {{
            {python} -c 'import sys
from samestep.shell.cli import main
sys.exit(main(["slurm", "sandbox", *sys.argv[1:]]))' "$@"
        }}
        trap 'sandbox down >&2' EXIT
        eval "$(sandbox up --nodes 2 --cpus 4 --quiet)"
        sandbox status >&2
        srun -N2 -n4 bash -c 'echo $SLURM_PROCID $(id -un)' | sort
        sbatch --quiet --wait --output=out --wrap 'srun -N2 -n2 hostname' -N2 -n2
        wc -l < out
    """
    become = ("setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}")
    try:
        done = subprocess.run(
            [*become, "--clear-groups", "bash", "-c", script],
            env=env(f"HOME={home} PATH=/usr/bin:/bin PYTHONPATH={source}:{site}")
            | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        ranks = [f"{rank} nobody" for rank in range(4)]
        assert done.stdout.splitlines() == [*ranks, "2"], done.stderr
        assert not find_processes(home / ".local/state/samestep/sandbox")
        assert not (home / ".local/state/samestep/sandbox").exists()
    finally:
        shutil.rmtree(home)


def _sleepers() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if Path(os.fsdecode(words[0])).name == "sleep":
            found.add(os.fsdecode(words[1]))
    return found
