"""What a sandbox's files say: `slurm.conf` and the script that Slurm runs before each task.

Pure functions; nothing here touches the disk.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import UserError

HEADER = "# Written by `samestep slurm sandbox up`; `… down` removes it."
"""The first line of a sandbox's `slurm.conf`: by it `down` knows that a folder is a sandbox."""

LONGEST_SOCKET_BYTES = 107  # Linux has 108, the last of them zero

TASK_PROLOG = """\
#!/bin/sh
# Ranks that plain `srun` starts meet at the first name of the node list, and node1 is not a name
# that resolves: all nodes are this machine.
[ -n "${MASTER_ADDR+set}" ] || echo export MASTER_ADDR=127.0.0.1
"""
"""Slurm sets the variables that a task prolog prints in the environment of the task."""


def node_names(count: int) -> list[str]:
    """Return node1 … nodeN."""
    return [f"node{number}" for number in range(1, count + 1)]


def slurm_conf(
    folder: Path,
    *,
    user: str,
    host: str,
    controller_port: int,
    node_ports: Sequence[int],
    cpus: int,
    first_job: int = 1,
) -> str:
    """Return the text of `slurm.conf` for one machine that plays several nodes.

    The folder is absolute, and the host is this machine's own name without its domain, as Slurm's
    daemons know it. Each node has a port, and claims that many CPUs, whatever the machine has.
    Jobs are numbered from `first_job` on.
    """
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={cpus} RealMemory=8192"  # MiB; nothing enforces it
        for name, port in zip(node_names(len(node_ports)), node_ports, strict=True)
    )
    return f"""\
{HEADER}
ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}

# Slurm holds a requeued job back for as long as a credential lives: 120 s if not said.
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5

StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/state/slurmctld.pid
SlurmdPidFile={folder}/state/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
TaskProlog={folder}/task_prolog.sh

# Nothing that needs root or control groups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none

# CPUs alone are handed out, and as many as each node claims; memory is not counted.
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides

# A killed slurmd is noticed in 15 to 20 s (in 25 to 30 s with the usual MessageTimeout of 10 s) and
# welcome when it is back; a job starts at once.
SlurmdTimeout=10
MessageTimeout=5
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1

# Slurm's own defaults, as on a cluster: SIGKILL comes 30 s after SIGTERM.
KillWait=30
MinJobAge=300
InactiveLimit=0

# A job in urgent takes the nodes of jobs in debug, which go back to the queue.
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def nodes_of(text: str) -> list[str]:
    """Return the names of the nodes in the text of a sandbox's `slurm.conf`."""
    return re.findall(r"^NodeName=(\S+)", text, re.MULTILINE)


def check_folder(folder: Path, *, nodes: int) -> None:
    """Refuse a folder whose name Slurm could not use.

    Raises:
        UserError: it is too long for a socket, or `slurm.conf` takes a character for its own.
    """
    if strange := sorted(set(re.sub(r"[\w./@+~-]", "", str(folder)))):
        raise UserError(
            f"A sandbox cannot live in {folder}: `slurm.conf` cannot hold a path with "
            f"{' '.join(repr(character) for character in strange)}. Give another with --dir."
        )
    # slurmstepd's socket is the longest: SPOOL/NODE_JOB.STEP
    longest = f"{folder}/spool/node{nodes}/node{nodes}_9999999.{2**32 - 1}"
    if len(longest.encode()) > LONGEST_SOCKET_BYTES:
        raise UserError(
            f"A sandbox cannot live in {folder}: a socket in it would have a path of "
            f"{len(longest.encode())} bytes, and Linux allows {LONGEST_SOCKET_BYTES}. Give a "
            "shorter one, as in `--dir /tmp/sandbox`."
        )
