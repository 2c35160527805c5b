"""How Slurm, or another launcher, started this rank: its variables, its job, the checks."""

import os
import re
from collections.abc import Mapping

from samestep.base.errors import UserError
from samestep.base.words import count, duration
from samestep.cluster.doctor.findings import Check, Finding, graded, green, red, yellow
from samestep.cluster.doctor.rank_facts import RankFacts, SlurmJob, SlurmTask, value_within
from samestep.cluster.slurm.options import read_time
from samestep.cluster.slurm.queue import call
from samestep.launch.ranks import launch as launches

_CONTROLLER_S = 10.0
_BATCH_STEP = "4294967291"
_SIGNAL = re.compile(r"^#SBATCH\s+(?:--signal[=\s]\s*)(\S+)", re.MULTILINE)
_END_OF_OPTIONS = re.compile(r"^\s*[^#\s]", re.MULTILINE)
SHORT_NOTICE_S = 60  # less leaves little time to write a checkpoint


def read_slurm(environment: Mapping[str, str] = os.environ) -> SlurmTask | None:
    """Return this process's place in its job; None outside of Slurm."""
    job = _first_set(environment, "SLURM_JOB_ID", "SLURM_JOBID")
    if not job:
        return None
    step = _first_set(environment, *launches.STEP_ID)
    in_step = step.isdecimal() and int(step) <= launches.MAX_SRUN_STEP
    listed = _first_set(environment, *launches.NODE_LISTS)
    tasks_on_nodes = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    on_nodes = re.findall(launches.TASKS_ON_NODES, tasks_on_nodes)
    try:
        hosts = tuple(launches.expand_node_list(listed))
    except UserError:
        hosts = ()
    return SlurmTask(
        job=job,
        in_step=in_step,
        in_script=step == _BATCH_STEP or (not step and bool(environment.get("SLURM_PROCID"))),
        num_tasks=_number(environment, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS"),
        job_nodes=_number(environment, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        hosts=hosts,
        tasks_per_node=_number(environment, "SLURM_NTASKS_PER_NODE"),
        # Slurm's short form: `4(x2),3` is 4, 4, 3.
        most_step_tasks_on_node=max((int(n) for n, _ in on_nodes), default=None),
        gpus_on_node=_number(environment, "SLURM_GPUS_ON_NODE"),
        gpu_bind=_gpu_bind(environment),
    )


def read_job(slurm: SlurmTask) -> SlurmJob | None:
    """Ask Slurm's controller about the job; None if it does not answer in time."""
    text = value_within(_CONTROLLER_S, lambda: call("scontrol", "show", "job", "-o", slurm.job), "")
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    if "TimeLimit" not in fields:
        return None
    is_batch = fields.get("BatchFlag", "0") != "0"
    write = ("scontrol", "write", "batch_script", slurm.job, "-")
    script = value_within(_CONTROLLER_S, lambda: call(*write), "") if is_batch else ""
    signal = signal_of(script) if script else None
    return SlurmJob(
        is_batch=is_batch,
        requeue=fields.get("Requeue") == "1",
        time_limit=fields["TimeLimit"],
        signal=signal,
        traps_signal=traps(script, signal) if signal else False,
    )


def signal_of(script: str) -> str:
    """Return a batch script's --signal, which Slurm itself does not show."""
    command = _END_OF_OPTIONS.search(script)  # options below the first command are ignored
    match = _SIGNAL.search(script[: command.start()] if command else script)
    return match[1] if match else ""


def traps(script: str, signal: str) -> bool:
    """Return whether a script traps the signal of its --signal."""
    name = signal.partition("@")[0].rpartition(":")[2].removeprefix("SIG")
    return bool(re.search(rf"^\s*trap\s.*\b(?:SIG)?{re.escape(name)}\b", script, re.MULTILINE))


def _gpu_bind(environment: Mapping[str, str]) -> str:
    if not launches.binds_gpus(environment):
        return ""
    options = ("GPUS_PER_TASK", "NTASKS_PER_GPU", "GPU_BIND")
    named = next((name for name in options if environment.get(f"SLURM_{name}")), "GPU_BIND_TYPE")
    value = environment[f"SLURM_{named}"]
    return f"--{named.removesuffix('_TYPE').lower().replace('_', '-')}={value}"


def _first_set(environment: Mapping[str, str], *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    value = _first_set(environment, *names)
    return int(value) if value.isdecimal() else None


def launcher(rank: RankFacts) -> Finding:
    """Report the launcher."""
    launch = rank.launch
    if launch.launcher == "none":
        return green("none: one process")
    nodes = count(launch.num_nodes, "node")
    return green(f"{launch.launcher}: {launch.world_size} ranks on {nodes}")


def slurm_start(rank: RankFacts) -> Finding | None:
    """Check that the job's tasks were started by srun, not only the script by the shell."""
    slurm, launch = rank.slurm, rank.launch
    if slurm is None:
        return None
    tasks = slurm.num_tasks or 1
    if launch.launcher == "none" and not slurm.in_step and tasks > 1:
        where = "the sbatch script" if slurm.in_script else "a shell of the job"
        found = f"{where}: one process, though job {slurm.job} has {tasks} tasks"
        advice = "Put srun before the command: srun samestep … starts one rank per task."
        return graded(found, advice, red_if=slurm.in_script, yellow_if=True)
    if launch.launcher == "none" and launch.note:
        return green(f"a shell of job {slurm.job}: one process")
    return green(f"job {slurm.job}, started by {launch.launcher}")


def torchrun_in_srun(rank: RankFacts) -> Finding | None:
    """Check that srun starts one torchrun per node, since each starts its own ranks."""
    slurm, launch = rank.slurm, rank.launch
    if slurm is None or not rank.elastic:
        return None
    most = slurm.most_step_tasks_on_node or 1
    if slurm.in_step and most > 1:
        ranks = count(launch.local_world_size, "rank")
        return red(
            f"srun started {most} torchrun agents on a node, each with {ranks}",
            "Use srun samestep … without torchrun, or srun --ntasks-per-node=1 torchrun ….",
        )
    return green("one torchrun on each node")


def tasks(rank: RankFacts) -> Finding | None:
    """Check that there are as many tasks as nodes times tasks per node."""
    slurm = rank.slurm
    if slurm is None or slurm.num_tasks is None:
        return None
    nodes, each = slurm.job_nodes or 1, slurm.tasks_per_node
    # Inside a step this is the step's own number of tasks; torchrun needs one on each node.
    if each and slurm.num_tasks < nodes * each and not rank.elastic:
        return red(
            f"{slurm.num_tasks} tasks, but {nodes} nodes × {each} tasks per node = {nodes * each}",
            f"Give --ntasks={nodes * each}, or only --nodes and --ntasks-per-node.",
        )
    if slurm.in_step and rank.launch.num_nodes < nodes:
        found = f"this step uses {rank.launch.num_nodes} of the job's {nodes} nodes"
        return yellow(found, f"To check all of them: srun --nodes={nodes} samestep doctor.")
    return green(f"{slurm.num_tasks} on {nodes} nodes" if nodes > 1 else f"{slurm.num_tasks}")


def gpu_binding(rank: RankFacts) -> Finding | None:
    """Check that each rank sees the GPU of its local rank, or exactly one."""
    slurm, launch, machine = rank.slurm, rank.launch, rank.machine
    if slurm is None:
        return None
    visible, ranks = len(machine.gpus), launch.local_world_size
    if slurm.gpus_on_node and not visible:
        return red(
            f"the job has {slurm.gpus_on_node} GPUs on this node, but PyTorch sees none",
            "Request them for the step too (srun --gpus-per-node=N); see the row cuda.",
        )
    see_all = (
        "Let every rank see all GPUs of its node: --gpus-per-node=N --gpu-bind=none in place of "
        "--gpus-per-task or --gpu-bind."
    )
    if visible == 1 < ranks and slurm.gpu_bind and launch.launcher == "srun":
        return yellow(
            f"each rank sees only one GPU ({slurm.gpu_bind})",
            f"Training works, but NCCL may not be able to copy from GPU to GPU. {see_all}",
        )
    if visible and visible < ranks:
        bound = f" ({slurm.gpu_bind})" if slurm.gpu_bind else ""
        return red(f"{count(visible, 'GPU')} visible to {ranks} ranks on a node{bound}", see_all)
    if visible > ranks:
        advice = f"The others are idle: --ntasks-per-node={visible} uses them."
        return yellow(f"{visible} GPUs for {ranks} ranks of a node", advice)
    return green(f"{visible} GPUs for {ranks} ranks of a node") if visible else None


def stop_signal(rank: RankFacts) -> Finding | None:
    """Check that a signal comes before the time limit, so that samestep can save."""
    job = rank.job
    if job is None or not job.is_batch or job.signal is None:
        return None
    add = "Add #SBATCH --signal=USR1@120: samestep saves and stops on this signal."
    if not job.signal:
        return yellow("no --signal in the script: the first is SIGTERM at the time limit", add)
    name, _, notice = job.signal.partition("@")
    to, _, name = name.rpartition(":")
    if "B" in to and not job.traps_signal:
        return yellow(
            f"--signal={job.signal} is sent to the script only, which does not trap it",
            "Write --signal=USR1@120, without B:, so that it goes to all ranks; or trap it in the "
            "script and pass it on.",
        )
    if notice.isdecimal() and int(notice) < SHORT_NOTICE_S:
        return yellow(f"{name} {notice} s before the limit", add)
    by = ", to the script's trap" if "B" in to else ""
    return green(f"{name} {notice or 60} s before the time limit{by}")


def requeue(rank: RankFacts) -> Finding | None:
    """Check that the job restarts by itself after a preemption or a node's failure."""
    job = rank.job
    if job is None or not job.is_batch:
        return None
    if not job.requeue:
        advice = "Add #SBATCH --requeue, and train with --run-dir DIR --resume."
        return yellow("off: a node failure or preemption ends the job", advice)
    return green("on; train with --run-dir DIR --resume")


def controller(rank: RankFacts) -> Finding | None:
    """Report that Slurm does not describe the job."""
    slurm = rank.slurm
    if slurm is None or rank.launch.rank != 0 or rank.job is not None:
        return None
    return yellow(
        "scontrol does not know this job: time limit, signal and requeue are unknown",
        "Try scontrol show job $SLURM_JOB_ID here; in a container, mount Slurm's programs, its "
        "configuration and munge's socket.",
    )


def time_limit(rank: RankFacts) -> Finding | None:
    """Check that an epoch fits into the job."""
    job, folder = rank.job, rank.folder
    if job is None:
        return None
    limit = read_time(job.time_limit)
    if limit is None:
        return green("none")
    if folder is None or folder.epoch_s is None:
        return green(f"{job.time_limit} (--run-dir RUN compares it with a run's epochs)")
    found = f"{job.time_limit}; an epoch takes {duration(folder.epoch_s)}"
    if folder.epoch_s > limit:
        advice = "To resume within an epoch, save within it: --checkpoint-every-minutes 10."
        return yellow(f"{found}: longer", advice)
    return green(f"{found}: {limit / max(folder.epoch_s, 1e-9):,.0f} of them fit")


CHECKS: list[Check[RankFacts]] = [
    *(launcher, slurm_start, torchrun_in_srun, tasks, gpu_binding),
    *(stop_signal, requeue, controller, time_limit),
]
