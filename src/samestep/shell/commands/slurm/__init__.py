"""Train in jobs that outlive time limits, preemption and failed nodes."""

EXAMPLES = (
    "slurm submit spiral --nodes 2 --ntasks-per-node 4 --time 02:00:00 -- --epochs 50",
    "slurm status",
)
