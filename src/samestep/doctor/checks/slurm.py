"""Checks of what Slurm, or another launcher, made of this rank."""

from dataclasses import dataclass

from samestep.doctor.check import Check, Finding, green, red, yellow
from samestep.doctor.facts.rank import Rank
from samestep.doctor.facts.slurm import Job, seconds

SHORT_NOTICE_S = 60
"""A signal that comes later than this leaves little time to write a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank and, on rank 0, what Slurm's controller says of the job."""

    rank: Rank
    job: Job | None = None


def launcher(place: Place) -> Finding:
    """Who started how many ranks."""
    launch = place.rank.launch
    if launch.launcher == "none":
        return green("none: one process")
    nodes = f"{launch.num_nodes} nodes" if launch.num_nodes > 1 else "one node"
    return green(f"{launch.launcher}: {launch.world_size} ranks on {nodes}")


def slurm_start(place: Place) -> Finding | None:
    """Whether the tasks of the job were started: by srun, not by the shell alone."""
    slurm, launch = place.rank.slurm, place.rank.launch
    if slurm is None:
        return None
    tasks = slurm.num_tasks or 1
    if launch.launcher == "none" and not slurm.in_step and tasks > 1:
        where = "the sbatch script" if slurm.in_script else "a shell of the job"
        finding = red if slurm.in_script else yellow
        return finding(
            f"{where}: one process, though job {slurm.job} has {tasks} tasks",
            "Put srun before the command: srun samestep … starts one rank for each task.",
        )
    if launch.launcher == "none" and launch.note:
        return green(f"a shell of job {slurm.job}: one process")
    return green(f"job {slurm.job}, started by {launch.launcher}")


def torchrun_in_srun(place: Place) -> Finding | None:
    """Each torchrun starts its own ranks: srun must start one torchrun for each node."""
    slurm, launch = place.rank.slurm, place.rank.launch
    if slurm is None or not place.rank.elastic:
        return None
    most = slurm.most_step_tasks_on_node or 1
    if slurm.in_step and most > 1:
        each = f"{launch.local_world_size} rank{'s' if launch.local_world_size > 1 else ''}"
        return red(
            f"srun started {most} torchruns on a node, each with {each}",
            "Use srun samestep … without torchrun, or srun --ntasks-per-node=1 torchrun ….",
        )
    return green("one torchrun on each node")


def tasks(place: Place) -> Finding | None:
    """Whether there are as many tasks as nodes times tasks per node."""
    slurm = place.rank.slurm
    if slurm is None or slurm.num_tasks is None:
        return None
    nodes, each = slurm.job_nodes or 1, slurm.tasks_per_node
    # Inside a step the number of tasks is the step's own, which srun may have been told; torchrun
    # needs one on each node, however many the job asked for.
    if each and slurm.num_tasks < nodes * each and not place.rank.elastic:
        return red(
            f"{slurm.num_tasks} tasks, but {nodes} nodes × {each} tasks per node = {nodes * each}",
            f"Give --ntasks={nodes * each}, or leave --ntasks out and give --nodes and "
            "--ntasks-per-node alone.",
        )
    if slurm.in_step and place.rank.launch.num_nodes < nodes:
        return yellow(
            f"this step uses {place.rank.launch.num_nodes} of the job's {nodes} nodes",
            f"To check them all: srun --nodes={nodes} samestep doctor.",
        )
    return green(f"{slurm.num_tasks} on {nodes} nodes" if nodes > 1 else f"{slurm.num_tasks}")


def gpu_binding(place: Place) -> Finding | None:
    """A rank takes the GPU of its local rank's number, or the only one that Slurm lets it see."""
    slurm, launch, machine = place.rank.slurm, place.rank.launch, place.rank.machine
    if slurm is None:
        return None
    seen, ranks = len(machine.gpus), launch.local_world_size
    if slurm.gpus_on_node and not seen:
        return red(
            f"the job has {slurm.gpus_on_node} GPUs on this node, PyTorch sees none",
            "Ask for them in the step too (srun --gpus-per-node=N); see the row cuda.",
        )
    see_all = (
        "Let every rank see all GPUs of its node: --gpus-per-node=N --gpu-bind=none in place of "
        "--gpus-per-task or --gpu-bind."
    )
    if seen == 1 < ranks and slurm.gpu_bind and launch.launcher == "srun":
        return yellow(
            f"each rank sees one GPU alone ({slurm.gpu_bind})",
            f"Training works, but NCCL may not copy from GPU to GPU. {see_all}",
        )
    if seen and seen < ranks:
        plural = "s" if seen > 1 else ""
        bound = f" ({slurm.gpu_bind})" if slurm.gpu_bind else ""
        return red(f"{seen} GPU{plural} visible for {ranks} ranks of a node{bound}", see_all)
    if seen > ranks:
        return yellow(
            f"{seen} GPUs for {ranks} ranks of a node",
            f"The others stand idle: --ntasks-per-node={seen} uses them.",
        )
    return green(f"{seen} GPUs for {ranks} ranks of a node") if seen else None


def stop_signal(place: Place) -> Finding | None:
    """Whether the job is told before its time is up, so that it can save."""
    job = place.job
    if job is None or not job.is_batch or job.signal is None:
        return None
    add = "Add #SBATCH --signal=USR1@120: samestep saves and stops when it comes."
    if not job.signal:
        return yellow("no --signal in the script: SIGTERM comes at the time limit", add)
    name, _, notice = job.signal.partition("@")
    to, _, name = name.rpartition(":")
    if "B" in to and not job.traps_signal:
        return yellow(
            f"--signal={job.signal} goes to the script alone, which has no trap for it",
            "Write --signal=USR1@120, without B: it goes to all ranks; or pass it on to them by a "
            "trap in the script.",
        )
    if notice.isdecimal() and int(notice) < SHORT_NOTICE_S:
        return yellow(f"{name} {notice} s before the limit", add)
    by = ", to the script's trap" if "B" in to else ""
    return green(f"{name} {notice or 60} s before the time limit{by}")


def requeue(place: Place) -> Finding | None:
    """Whether the job starts again by itself after a preemption or a node's failure."""
    job = place.job
    if job is None or not job.is_batch:
        return None
    if not job.requeue:
        return yellow(
            "off: a failed node or a preemption ends the job",
            "Add #SBATCH --requeue, and train with --run-dir DIR --resume.",
        )
    return green("on; train with --run-dir DIR --resume")


def controller(place: Place) -> Finding | None:
    """Whether the settings of the job could be seen at all."""
    slurm = place.rank.slurm
    if slurm is None or place.rank.launch.rank != 0 or place.job is not None:
        return None
    return yellow(
        "scontrol does not tell of this job: time limit, signal and requeue are unknown",
        "Try scontrol show job $SLURM_JOB_ID here; in a container, mount Slurm's programs, its "
        "configuration and munge's socket.",
    )


def time_limit(place: Place) -> Finding | None:
    """Whether an epoch fits into the job."""
    job, folder = place.job, place.rank.folder
    if job is None:
        return None
    limit = seconds(job.time_limit)
    if limit is None:
        return green("none")
    if folder is None or folder.epoch_s is None:
        return green(f"{job.time_limit} (--run-dir RUN compares it with a run's epochs)")
    found = f"{job.time_limit}; an epoch takes {folder.epoch_s:,.0f} s"
    if folder.epoch_s > limit:
        return yellow(
            f"{found}: longer",
            "samestep resumes inside an epoch, but save on the way: --checkpoint-every-minutes 10.",
        )
    return green(f"{found}: {limit / max(folder.epoch_s, 1e-9):,.0f} of them fit")


CHECKS: list[Check[Place]] = [
    *(launcher, slurm_start, torchrun_in_srun, tasks, gpu_binding),
    *(stop_signal, requeue, controller, time_limit),
]
