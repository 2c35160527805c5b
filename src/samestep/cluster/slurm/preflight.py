"""What the check of a job's nodes found before its ranks: which node is not fit, and why.

The job's script runs `samestep doctor` on all nodes, and keeps its table in the run directory.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.base.run.files import read_object
from samestep.cluster.slurm.rank_ends import first_end

TABLE = "preflight.json"
NOT_PASSED = "PREFLIGHT"
"""Stands for the signal that a job's script received, where it did not start its ranks."""

_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for .* failed on node (\S+): (.+)")


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Why the ranks of a start were not started."""

    why: str
    nodes: tuple[str, ...]
    """The nodes that are to blame; none if it is not a node's fault."""
    advice: tuple[str, ...] = ()


def read_failed(run: Path, lines: Sequence[str], first: str, num_nodes: int) -> Failed:
    """Read what a preflight found, from its table and the log's lines; `first` is rank 0's node."""
    red = [row for row in read_object(run / TABLE).get("checks", ()) if row["status"] == "red"]
    red.sort(key=lambda row: not row["hosts"])
    if red:
        nodes = tuple(dict.fromkeys(host for row in red for host in row["hosts"]))
        why = "; ".join(f"{row['name']}: {row['found']}" for row in red)
        if num_nodes == 1:
            nodes = (first,)
        elif len(nodes) == num_nodes:  # others would be no better
            nodes = ()
        advice = tuple(f"  {row['name']}: {row['advice']}" for row in red)
        return Failed(why=f"the preflight: {why}", nodes=nodes, advice=advice)
    # Rank 0 has not come as far as to write the table.
    if lost := next(filter(None, map(_NOT_LAUNCHED.match, lines)), None):
        return Failed(why=f"the preflight did not start on {lost[1]}: {lost[2]}", nodes=(lost[1],))
    end = first_end(lines)
    if end is not None and (end.comes_again or end.rank == 0):
        nodes = () if end.comes_again else (end.node,)
        return Failed(why=f"the preflight: {end.sentence}", nodes=nodes)
    return Failed(why=f"the preflight did not end on {first}", nodes=(first,))
