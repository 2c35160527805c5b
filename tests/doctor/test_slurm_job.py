"""What Slurm's variables mean, and each mistake in how a job was started."""

from dataclasses import replace

import pytest

from samestep.doctor import slurm_job as checks
from samestep.doctor.findings import run_checks, worst
from samestep.doctor.slurm_job import read_slurm, signal_of, traps
from samestep.ranks.launch import Launch
from tests.doctor.situations import FOLDER, JOB, gpus, in_job, rank, says
from tests.processes import env

STEP = env("""
    SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_JOB_NUM_NODES=2
    SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_NTASKS_PER_NODE=2 SLURM_STEP_NODELIST=node[1-2]
    SLURM_GPUS_ON_NODE=2 SLURM_GPUS_PER_TASK=1
""")
SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}


def test_a_step_and_how_its_tasks_see_gpus_are_read_from_its_variables():
    slurm = read_slurm(STEP)
    assert slurm.in_step
    assert (slurm.num_tasks, slurm.job_nodes, slurm.tasks_per_node) == (4, 2, 2)
    assert (slurm.most_step_tasks_on_node, slurm.gpus_on_node) == (2, 2)
    assert slurm.hosts == ("node1", "node2")
    assert slurm.gpu_bind == "--gpus-per-task=1"
    # Values that are neither numbers nor names are left out.
    slurm = read_slurm(STEP | {"SLURM_GPUS_ON_NODE": "two", "SLURM_STEP_NODELIST": "node[2-1]"})
    assert (slurm.gpus_on_node, slurm.hosts) == (None, ())
    assert read_slurm({}) is None
    found = {"NTASKS_PER_GPU": "--ntasks-per-gpu=1", "GPU_BIND": "--gpu-bind=single:1"}
    for name, bound in found.items():
        variables = {"SLURM_JOB_ID": "7", f"SLURM_{name}": bound.partition("=")[2]}
        assert read_slurm(variables).gpu_bind == bound
    assert read_slurm({"SLURM_JOB_ID": "7", "SLURM_GPU_BIND": "none"}).gpu_bind == ""


@pytest.mark.parametrize(
    ("more", "in_script"),
    [({}, True), ({"SLURM_STEP_ID": "4294967291"}, True), ({"SLURM_STEP_ID": "4294967290"}, False)],
)
def test_the_script_and_the_interactive_shell_are_no_steps(more, in_script):
    slurm = read_slurm(SCRIPT | more)
    assert (slurm.in_step, slurm.in_script, slurm.num_tasks) == (False, in_script, 4)


def test_the_signal_of_a_script_and_its_trap_are_found_and_in_no_comment():
    assert signal_of("#!/bin/bash\n#SBATCH --signal=USR1@120\nsrun x") == "USR1@120"
    assert signal_of("#!/bin/bash\n#SBATCH --signal B:TERM@60\nsrun x") == "B:TERM@60"
    assert signal_of("#!/bin/bash\n#SBATCH --nodes=2\nsrun x\n#SBATCH --signal=USR1@120") == ""
    script = "trap 'pass_on USR1' USR1 TERM\n# trap : USR2\n"
    assert traps(script, "B:USR1@120")
    assert traps(script, "B:SIGTERM")
    assert not traps(script, "B:USR2@60")


@pytest.mark.parametrize("job", [JOB, None])
def test_a_well_started_job_is_green(job):
    findings = run_checks(checks.CHECKS, in_job(job=job))
    known = [f for f in findings if f.name != "controller"]
    assert worst(known) == "green", findings


ALONE = Launch(note="This is a shell of Slurm job 7.")
OF_TORCHRUN = {"launcher": "torchrun", "num_nodes": 1, "local_world_size": 4}
ONE_GPU = {"machine": {"gpus": gpus(1)}}
SHORT = {"job": replace(JOB, time_limit="30:00"), "folder": replace(FOLDER, epoch_s=3600.0)}

# Check → changes that plant a fault, each with the status and words that it must say.
FAULTS = {
    checks.slurm_start: [
        ({"launch": vars(ALONE), "slurm": {"in_step": False, "in_script": True}}, "red: srun"),
        ({"launch": vars(ALONE), "slurm": {"in_step": False}}, "yellow: 4 tasks"),
    ],
    checks.torchrun_in_srun: [
        ({"launch": OF_TORCHRUN, "elastic": True}, "red: --ntasks-per-node=1 torchrun")
    ],
    checks.tasks: [
        ({"slurm": {"num_tasks": 3, "tasks_per_node": 2}}, "red: --ntasks=4"),
        ({"launch": {"num_nodes": 1}}, "yellow: srun --nodes=2"),
    ],
    checks.gpu_binding: [
        (ONE_GPU | {"slurm": {"gpu_bind": "--gpu-bind=single:1"}}, "yellow: --gpu-bind=none"),
        (ONE_GPU, "red: 1 GPU | 2 ranks"),
        ({"slurm": {"gpus_on_node": 2}}, "red: 2 GPUs"),
        ({"machine": {"gpus": gpus(4)}}, "yellow: --ntasks-per-node=4"),
    ],
    checks.stop_signal: [
        ({"job": replace(JOB, signal="")}, "yellow: --signal=USR1@120"),
        ({"job": replace(JOB, signal="B:USR1@120")}, "yellow: without B:"),
        ({"job": replace(JOB, signal="USR1@10")}, "yellow: 10 s"),
    ],
    checks.requeue: [({"job": replace(JOB, requeue=False)}, "yellow: --requeue")],
    checks.controller: [({"job": None}, "yellow: scontrol")],
    checks.time_limit: [(SHORT, "yellow: 3,600 s | --checkpoint-every-minutes")],
}


@pytest.mark.parametrize("check", FAULTS)
def test_each_planted_fault_is_found_and_comes_with_advice(check):
    for changes, said in FAULTS[check]:
        says(check(in_job(**changes)), said)


def test_what_is_right_is_green_and_outside_of_slurm_only_the_launcher_is_told():
    says(checks.gpu_binding(in_job(machine={"gpus": gpus(2)})), "green", "2 GPUs")
    one_each = {"slurm": {"most_step_tasks_on_node": 1}, "elastic": True}
    says(checks.torchrun_in_srun(in_job(**one_each)), "green")
    says(checks.stop_signal(in_job(job=replace(JOB, signal="TERM"))), "green", "60 s")
    passed_on = replace(JOB, signal="B:USR1@120", traps_signal=True)
    says(checks.stop_signal(in_job(job=passed_on)), "green", "USR1 120 s", "trap")
    torchrun = {"slurm": {"num_tasks": 2, "tasks_per_node": 4}, "elastic": True}
    says(checks.tasks(in_job(**torchrun)), "green")  # one on each of two nodes
    says(checks.time_limit(in_job(folder=replace(FOLDER, epoch_s=60.0))), "green", "1,440")
    says(checks.time_limit(in_job(job=replace(JOB, time_limit="UNLIMITED"))), "green", "none")
    alone = {"launch": vars(ALONE), "slurm": {"in_step": False, "num_tasks": 1}}
    says(checks.slurm_start(in_job(**alone)), "green", "job 7")
    # What is not a script has neither signal nor requeue.
    interactive = in_job(job=replace(JOB, is_batch=False, signal=None, requeue=False))
    assert checks.stop_signal(interactive) is None
    assert checks.requeue(interactive) is None
    findings = run_checks(checks.CHECKS, rank())
    assert [f.name for f in findings] == ["launcher"]
