"""What Slurm's variables, and Slurm itself, say of the job that this process is part of."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.doctor.bounded import within
from samestep.errors import UserError
from samestep.ranks.launch import (
    MAX_SRUN_STEP,
    NODE_LISTS,
    STEP_ID,
    TASKS_ON_NODES,
    binds_gpus,
    expand_node_list,
)
from samestep.slurm.tools import call

_CONTROLLER_S = 10.0
_BATCH_STEP = "4294967291"
_SIGNAL = re.compile(r"^#SBATCH\s+(?:--signal[=\s]\s*)(\S+)", re.MULTILINE)
_END_OF_OPTIONS = re.compile(r"^\s*[^#\s]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A process's place in a Slurm job, by the variables that Slurm sets."""

    job: str
    in_step: bool
    """Whether srun started this process, or its launcher, as a task."""
    in_script: bool = False
    """Whether this process runs in the sbatch script itself."""
    num_tasks: int | None = None
    """Tasks of the step, or of the job where there is no step."""
    job_nodes: int | None = None
    """Nodes of the job."""
    hosts: tuple[str, ...] = ()
    """Their names; of the step, where there is one."""
    tasks_per_node: int | None = None
    """What --ntasks-per-node asked for."""
    most_step_tasks_on_node: int | None = None
    """Tasks of this step on the node that has the most."""
    gpus_on_node: int | None = None
    """GPUs that the job has on this node."""
    gpu_bind: str = ""
    """By which option each task sees GPUs of its own alone; empty if it sees all of its node."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What Slurm's controller says of a job."""

    is_batch: bool
    requeue: bool
    time_limit: str
    """As Slurm writes it: 1-02:03:04, or UNLIMITED."""
    signal: str | None = None
    """The script's --signal; empty if it has none, None if the script cannot be read."""
    traps_signal: bool = False
    """Whether the script has a trap for it, as one that passes it on."""


def read_slurm(environment: Mapping[str, str] = os.environ) -> Slurm | None:
    """Read a process's place in its job; None outside of Slurm."""
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
    if not job:
        return None
    step = next((environment[name] for name in STEP_ID if environment.get(name)), "")
    in_step = step.isdecimal() and int(step) <= MAX_SRUN_STEP
    return Slurm(
        job=job,
        in_step=in_step,
        in_script=step == _BATCH_STEP or (not step and bool(environment.get("SLURM_PROCID"))),
        num_tasks=_number(environment, "SLURM_STEP_NUM_TASKS" if in_step else "SLURM_NTASKS"),
        job_nodes=_number(environment, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        hosts=_hosts(environment),
        tasks_per_node=_number(environment, "SLURM_NTASKS_PER_NODE"),
        most_step_tasks_on_node=_most(environment.get("SLURM_STEP_TASKS_PER_NODE", "")),
        gpus_on_node=_number(environment, "SLURM_GPUS_ON_NODE"),
        gpu_bind=_gpu_bind(environment),
    )


def read_job(slurm: Slurm) -> Job | None:
    """Ask Slurm's controller about the job; None if it does not answer in time."""
    text = within(_CONTROLLER_S, lambda: call("scontrol", "show", "job", "-o", slurm.job), "")
    fields = dict(re.findall(r"(\w+)=(\S*)", text))
    if "TimeLimit" not in fields:
        return None
    is_batch = fields.get("BatchFlag", "0") != "0"
    script = ""
    if is_batch:
        arguments = ("write", "batch_script", slurm.job, "-")
        script = within(_CONTROLLER_S, lambda: call("scontrol", *arguments), "")
    signal = signal_of(script) if script else None
    return Job(
        is_batch=is_batch,
        requeue=fields.get("Requeue") == "1",
        time_limit=fields["TimeLimit"],
        signal=signal,
        traps_signal=traps(script, signal) if signal else False,
    )


def signal_of(script: str) -> str:
    """Return what --signal a batch script asks for; Slurm itself does not show it."""
    command = _END_OF_OPTIONS.search(script)  # below the first command, options do not count
    match = _SIGNAL.search(script[: command.start()] if command else script)
    return match[1] if match else ""


def traps(script: str, signal: str) -> bool:
    """Whether a script has a trap for the signal that its --signal asks for."""
    name = signal.partition("@")[0].rpartition(":")[2].removeprefix("SIG")
    return bool(re.search(rf"^\s*trap\s.*\b(?:SIG)?{re.escape(name)}\b", script, re.MULTILINE))


def seconds(limit: str) -> float | None:
    """Read a time limit: `30` minutes, `4:30`, `1:00:00`, `2-12:00:00`; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] or match[4]:  # hours come first
        return days * 86400.0 + first * 3600.0 + second * 60.0 + third
    return first * 60.0 + second


def _hosts(environment: Mapping[str, str]) -> tuple[str, ...]:
    listed = next((environment[name] for name in NODE_LISTS if environment.get(name)), "")
    try:
        return tuple(expand_node_list(listed))
    except UserError:
        return ()


def _gpu_bind(environment: Mapping[str, str]) -> str:
    if not binds_gpus(environment):
        return ""
    options = ("GPUS_PER_TASK", "NTASKS_PER_GPU", "GPU_BIND")
    named = next((name for name in options if environment.get(f"SLURM_{name}")), "GPU_BIND_TYPE")
    value = environment[f"SLURM_{named}"]
    return f"--{named.removesuffix('_TYPE').lower().replace('_', '-')}={value}"


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    value = next((environment[name] for name in names if environment.get(name)), "")
    return int(value) if value.isdecimal() else None


def _most(tasks: str) -> int | None:
    """Return the largest count in Slurm's short form: `4(x2),3` is 4, 4, 3."""
    return max((int(count) for count, _ in re.findall(TASKS_ON_NODES, tasks)), default=None)
