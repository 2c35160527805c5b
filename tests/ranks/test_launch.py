"""Launchers as the variables they leave, and what `detect_launch` makes of them."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.base.errors import UserError
from samestep.launch.ranks.launch import Launch, detect_launch, expand_node_list
from tests.processes import env

TORCHRUN = env("""
    RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2
    ROLE_RANK=5 ROLE_NAME=default ROLE_WORLD_SIZE=8 MASTER_ADDR=gpu011 MASTER_PORT=29400
    TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 OMP_NUM_THREADS=1
""")
ALONE = env("RANK=0 LOCAL_RANK=0 GROUP_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 GROUP_WORLD_SIZE=1")
FIRST_TASK = env("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0")
# What every process of the allocation sees: four nodes of eight tasks.
ALLOCATION = env("""
    SLURM_CLUSTER_NAME=cluster SLURM_JOB_ID=4711 SLURM_JOBID=4711 SLURM_JOB_NAME=train.sh
    SLURM_JOB_NODELIST=gpu[011-014] SLURM_NODELIST=gpu[011-014] SLURM_JOB_NUM_NODES=4
    SLURM_NNODES=4 SLURM_NTASKS=32 SLURM_NPROCS=32 SLURM_TASKS_PER_NODE=8(x4)
    SLURM_SUBMIT_HOST=login
""")
SBATCH_SCRIPT = (
    ALLOCATION | FIRST_TASK | env("SLURM_GTIDS=0 SLURM_TASK_PID=16360 SLURMD_NODENAME=gpu011")
)
# `srun --nodes=2 --ntasks=6 --relative=2` within it.
STEP = SBATCH_SCRIPT | env("""
    SLURM_STEP_ID=3 SLURM_STEPID=3 SLURM_STEP_NUM_TASKS=6 SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NODELIST=gpu[013-014] SLURM_STEP_TASKS_PER_NODE=3(x2)
    SLURM_PROCID=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_SRUN_COMM_PORT=41771
""")
ONE_TASK_STEP = env("""
    SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=gpu012
    SLURM_STEP_TASKS_PER_NODE=1
""")
# As LaunchParameters=use_interactive_step has it: the job's counts stay, the step has one task.
SALLOC_SHELL = (
    ALLOCATION
    | FIRST_TASK
    | ONE_TASK_STEP
    | env("""
    SLURM_JOB_NAME=interactive SLURM_STEP_ID=4294967290 SLURM_STEPID=4294967290
    SLURM_STEP_NODELIST=gpu011 SLURM_PTY_PORT=34889 SLURM_PTY_WIN_COL=236 SLURM_PTY_WIN_ROW=64
""")
)
PTY_SHELL = SALLOC_SHELL | env("""
    SLURM_JOB_NAME=bash SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_NTASKS=1 SLURM_TASKS_PER_NODE=1
""")
ONE_TASK = STEP | ONE_TASK_STEP | FIRST_TASK

OPEN_MPI = env("""
    OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2
    OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=2 OMPI_UNIVERSE_SIZE=8
    OMPI_MCA_ess_base_jobid=1966735361 PMIX_NAMESPACE=1966735361 PMIX_RANK=6
""")
OPEN_MPI_ONE_NODE = OPEN_MPI | env("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2")
OPEN_MPI_ALONE = env("""
    OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0
    OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=1
""")
HYDRA = env("PMI_RANK=3 PMI_SIZE=4 PMI_FD=9 MPI_LOCALRANKID=3 MPI_LOCALNRANKS=4")
MASTER = env("MASTER_ADDR=gpu011 MASTER_PORT=29400")
BY_HAND = env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1")
# The step in which mpirun runs its daemons, one on each node but the first.
DAEMON_STEP = SBATCH_SCRIPT | ONE_TASK_STEP | env("SLURM_STEP_ID=0")


def launched(told: str) -> Launch:
    """Return a launch of `launcher rank/world size, local rank/local world size, node/nodes`."""
    launcher, *numbers = re.findall(r"\w+", told)
    names = ("rank", "world_size", "local_rank", "local_world_size", "node", "num_nodes")
    found = dict(zip(names, map(int, numbers), strict=False))
    if "num_nodes" in found:
        return Launch(launcher=launcher, master_addr="gpu011", master_port=29400, **found)
    return Launch(launcher=launcher, master_port=29500 if found else 0, **found)


ON_TORCHRUN, ON_SRUN = "torchrun 5/8, 1/4, 1/2", "srun 4/6, 1/3, 1/2"
ON_OPEN_MPI = "openmpi 6/8, 2/4, 1/2"
RANKS = {
    "nothing": (env("HOME=/home/me PATH=/usr/bin"), "none"),
    "empty variables": (env("RANK= WORLD_SIZE= SLURM_JOB_ID="), "none"),
    "torchrun": (TORCHRUN, ON_TORCHRUN),
    "torchrun under srun": (STEP | TORCHRUN, ON_TORCHRUN),
    "torchrun, one process": (TORCHRUN | ALONE, "torchrun"),
    "torchrun, unequal nodes": (TORCHRUN | env("LOCAL_WORLD_SIZE=3"), "torchrun 5/8, 1/3, 1/2"),
    "torchrun --virtual-local-rank": (TORCHRUN | env("LOCAL_RANK=0"), "torchrun 5/8, 0/4, 1/2"),
    "torchrun's variables by hand": (BY_HAND | MASTER, "torchrun 1/2, 0/1, 1/2"),
    "WORLD_SIZE alone is not torchrun": (env("WORLD_SIZE=8"), "none"),
    "a step smaller than its job": (STEP | MASTER, ON_SRUN),
    "srun --mpi=pmi2": (STEP | MASTER | env("PMI_RANK=4 PMI_SIZE=6 PMI_FD=12"), ON_SRUN),
    "old Slurm without step counts": (
        {name: value for name, value in STEP.items() if "SLURM_STEP_" not in name}
        | MASTER
        | env("SLURM_NTASKS=6 SLURM_NNODES=2 SLURM_TASKS_PER_NODE=3(x2)"),
        ON_SRUN,
    ),
    "srun with unequal nodes": (
        STEP
        | MASTER
        | env("SLURM_STEP_NUM_TASKS=11 SLURM_STEP_NUM_NODES=3 SLURM_STEP_NODELIST=gpu[012-014]")
        | env("SLURM_STEP_TASKS_PER_NODE=4(x2),3")
        | env("SLURM_PROCID=10 SLURM_LOCALID=2 SLURM_NODEID=2"),
        "srun 10/11, 2/3, 2/3",
    ),
    "srun with one task": (ONE_TASK | MASTER, "srun"),
    "srun typed in the shell of salloc": (
        SALLOC_SHELL | STEP | MASTER | env("SLURM_JOB_NAME=interactive SLURM_STEP_ID=0"),
        ON_SRUN,
    ),
    "Open MPI on two nodes": (OPEN_MPI | MASTER, ON_OPEN_MPI),
    "Open MPI under sbatch": (SBATCH_SCRIPT | OPEN_MPI | MASTER, ON_OPEN_MPI),
    "Open MPI below its own srun": (DAEMON_STEP | OPEN_MPI | MASTER, ON_OPEN_MPI),
    "Open MPI with one process": (OPEN_MPI | OPEN_MPI_ALONE, "openmpi"),
    "MPICH on one node": (HYDRA, "pmi 3/4, 3/4"),
    "PMI with one process": (env("PMI_RANK=0 PMI_SIZE=1"), "pmi"),
}


@pytest.mark.parametrize("name", RANKS)
def test_every_launcher_is_understood(name):
    environment, expected = RANKS[name]
    assert detect_launch(environment) == launched(expected)


SHELLS = {
    "salloc without an interactive step": (ALLOCATION, "a shell"),
    "a VS Code terminal": (env("SLURM_JOB_ID=4711"), "a shell"),
    "an sbatch script": (SBATCH_SCRIPT, "the sbatch script"),
    "sbatch from the shell of salloc": (SALLOC_SHELL | SBATCH_SCRIPT, "the interactive shell"),
    "salloc with an interactive step": (SALLOC_SHELL, "the interactive shell"),
    "the extern step": (ALLOCATION | env("SLURM_STEP_ID=4294967292"), "extern step"),
    "a step yet unknown": (ALLOCATION | env("SLURM_STEP_ID=4294967293"), "an internal step"),
    "srun --pty bash": (PTY_SHELL, "a terminal"),
}


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_in_an_allocation_is_one_process_and_says_so(name):
    environment, shell = SHELLS[name]
    launch = detect_launch(environment)
    assert launch == Launch(note=launch.note)
    assert launch.note is not None
    for word in (shell, "job 4711", "`srun samestep train …`"):
        assert word in launch.note


@pytest.mark.parametrize("others", [STEP, OPEN_MPI])
def test_a_single_rank_of_torchrun_is_told_if_others_were_started_with_it(others):
    note = detect_launch(others | TORCHRUN | ALONE).note
    assert "trains by itself" in note
    assert detect_launch(ONE_TASK | OPEN_MPI_ALONE | TORCHRUN | ALONE).note is None


@given(job=st.integers(1, 2**31), steps=st.sets(st.integers(0, 5000), min_size=2, max_size=5))
def test_steps_of_one_job_listen_at_different_ports(job, steps):
    numbers = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for step in steps]
    ports = {detect_launch(STEP | ids).master_port for ids in numbers}
    assert len(ports) == len(steps)


def test_all_ranks_agree_where_rank_0_listens_and_reading_it_needs_no_torch():
    places = set()
    for rank in range(6):
        place = {"SLURM_NODEID": rank // 3, "SLURM_LOCALID": rank % 3, "SLURM_PROCID": rank}
        launch = detect_launch(STEP | {name: str(number) for name, number in place.items()})
        assert (launch.rank, launch.node, launch.local_rank) == (rank, rank // 3, rank % 3)
        places.add((launch.master_addr, launch.master_port))
    ((host, port),) = places
    assert host == "gpu013"
    assert port in range(12000, 30000)
    launch = detect_launch(OPEN_MPI_ONE_NODE)
    other = {"OMPI_MCA_ess_base_jobid": "1966735362"}
    assert launch.master_addr == "127.0.0.1"
    assert launch.master_port in range(12000, 30000)
    assert detect_launch(OPEN_MPI_ONE_NODE | other).master_port != launch.master_port
    version_5 = OPEN_MPI_ONE_NODE | {"PMIX_NAMESPACE": "prterun-head-1234@1"}
    del version_5["OMPI_MCA_ess_base_jobid"]
    assert detect_launch(version_5).master_port in range(12000, 30000)
    code = "import sys, samestep.launch.ranks.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TASKS_PER_NODE, ON_TWO_NODES = "SLURM_STEP_TASKS_PER_NODE", OPEN_MPI | MASTER
# Variables, what is wrong with them, which the message names, and what it says else.
MISTAKES = {
    "no local rank": ({}, "RANK=3 WORLD_SIZE=4", "LOCAL_RANK"),
    "a word for a rank": (TORCHRUN, "RANK=abc"),
    "an Arabic digit": (TORCHRUN, "RANK=٣"),
    "a rank beyond the world": (TORCHRUN, "RANK=8", "0 to 7"),
    "a local rank beyond the node": (TORCHRUN, "LOCAL_RANK=4", "0 to 3"),
    "a node larger than the world": (TORCHRUN, "LOCAL_WORLD_SIZE=9"),
    "a group beyond the groups": (TORCHRUN, "GROUP_RANK=2", "0 to 1"),
    "a port that does not exist": (TORCHRUN, "MASTER_PORT=65536"),
    "by hand without a master": (BY_HAND, "", "2 nodes", "MASTER_ADDR", "MASTER_PORT"),
    "a task beyond the step": (STEP, "SLURM_PROCID=6", "0 to 5"),
    "a step without a number": (STEP, "SLURM_STEP_ID=batch"),
    "a step without a task's number": (STEP | env("SLURM_PROCID="), "", "SLURM_PROCID"),
    "too few counts of tasks": (STEP, f"{TASKS_PER_NODE}=6", "SLURM_NODEID=1"),
    "malformed counts of tasks": (STEP, f"{TASKS_PER_NODE}=3x2", "4(x2),3"),
    "a malformed node list": (STEP | env("SLURM_STEP_NODELIST=gpu[13-"), "", "'gpu[13-'"),
    "Open MPI without a master": (OPEN_MPI, "", "2 nodes", "MASTER_ADDR", "MASTER_PORT"),
    "Open MPI without a local rank": (
        env("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"),
        *("", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "Open MPI on unequal nodes": (
        ON_TWO_NODES | env("OMPI_COMM_WORLD_LOCAL_SIZE=3"),
        *("", "Rank 6 of 8", "same number"),
    ),
    "Open MPI dealing ranks out node by node": (
        ON_TWO_NODES | env("OMPI_COMM_WORLD_LOCAL_RANK=3"),
        *("", "Rank 6 of 8", "local rank 3 of 4", "one node after the other"),
    ),
    "PMI without a local rank": (env("PMI_RANK=1 PMI_SIZE=2"), "", "MPI_LOCALNRANKS"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_the_variable_and_its_value(name):
    environment, wrong, *words = MISTAKES[name]
    with pytest.raises(UserError) as caught:
        detect_launch(environment | env(wrong))
    for word in (*wrong.split(), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("node_list", "hosts"),
    [
        ("login", ["login"]),
        ("gpu[001-003,7],login", ["gpu001", "gpu002", "gpu003", "gpu7", "login"]),
        ("n[1-2]-ib[1-2]", ["n1-ib1", "n1-ib2", "n2-ib1", "n2-ib2"]),
        ("r[8-11]", ["r8", "r9", "r10", "r11"]),
        ("r[08-11]", ["r08", "r09", "r10", "r11"]),
        ("r[98-101].cluster", ["r98.cluster", "r99.cluster", "r100.cluster", "r101.cluster"]),
        ("a[1][2-3]", ["a12", "a13"]),
        ("b,a[2,1]", ["b", "a2", "a1"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_a_node_list_is_written_out_in_order(node_list, hosts):
    assert expand_node_list(node_list) == hosts


@pytest.mark.parametrize(
    "node_list",
    [
        *["", ",", "a,", ",a", "a,,b", "a b", "a, b", "a\n"],
        *["a[", "a]", "a[1", "a1]", "a[]", "a[1,]", "a[,1]", "a[1-]", "a[-1]", "a[1-2-3]"],
        *["a[3-1]", "a[1,3-1]", "a[x]", "a[1x3]", "a[[1]]", "a[1]]", "a[1 -2]", "a[٣]"],
    ],
)
def test_a_malformed_node_list_is_shown_with_a_good_one(node_list):
    with pytest.raises(UserError) as caught:
        expand_node_list(node_list)
    assert repr(node_list) in str(caught.value)
    assert "gpu[001-003,7],login" in str(caught.value)
