"""A graph per ball, in batches: what is known before the ball, as nodes and edges.

Nodes: one each of `CONTEXTS`, the balls of the innings so far, and the query. Edges: from the match
to the balls, among the balls, from a ball to the players who met it, and from all of these to the
query. All graphs of a batch are built at once, by arithmetic on rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from samestep.base.errors import UserError
from samestep.core.recipes.cricket.corpus import Array
from samestep.core.recipes.cricket.tables import CONTEXTS, SAME, Tables

PRECEDES = (1, 2, 3)
"""Distances in balls of the edges `precedes`."""
BALL_EDGES = (
    ("match", "frames", "ball"),
    *(("ball", name, "ball") for name in ("precedes", *SAME)),
)
PLAYER_EDGES = (
    ("ball", "faced_by", "striker"),
    ("ball", "faced_by", "non_striker"),
    ("ball", "bowled_by", "bowler"),
)
QUERY_EDGES = (("ball", "before", "query"), *((name, "informs", "query") for name in CONTEXTS))
EDGES = (*BALL_EDGES, *PLAYER_EDGES, *QUERY_EDGES)
"""Types of edges; those from ball to ball and from ball to query have a distance."""
_LONGEST = 120.0


def hetero_data() -> Any:
    """Return PyTorch Geometric's `HeteroData`."""
    try:
        from torch_geometric.data import HeteroData  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            "The cricket recipe needs PyTorch Geometric: pip install 'samestep[cricket]'"
        ) from error
    return HeteroData


@dataclass(frozen=True)
class GraphSource:
    """Tables, and what of them goes into a graph."""

    tables: Tables
    history: int = 150
    """Most balls before the query."""
    left_out: frozenset[str] = frozenset()
    """Names of edges that no graph has, such as `precedes`."""


class Sample(NamedTuple):
    """A ball whose graph is wanted."""

    source: GraphSource
    row: int


class BallGraphs(Dataset[Sample]):
    """Some balls of a corpus; a sample is a reference, and `collate` builds the graphs."""

    def __init__(self, source: GraphSource, rows: Array) -> None:
        self.source, self.rows = source, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.source, int(self.rows[index]))

    def read_batch(self, indices: Sequence[int]) -> list[Sample]:
        """Return several samples; nothing is drawn, so no generator is seeded for each."""
        return [Sample(self.source, row) for row in self.rows[np.asarray(indices)].tolist()]


def collate(samples: Sequence[Sample]) -> Any:
    """Return the graphs of some balls as one `HeteroData`."""
    return build(samples[0].source, torch.tensor([sample.row for sample in samples]))


def build(source: GraphSource, rows: Tensor) -> Any:
    """Return the graphs of some balls (graphs,) as one `HeteroData`.

    Each type of node has `x`, `batch` (its graph), and `ids` where it has identities; each type of
    edge `edge_index`, and `edge_attr` (edges, 1) where it has a distance. The query has `y`, the
    runs to come, and `group`: phase, innings, over and ball.
    """
    tables = source.tables
    graph = hetero_data()()
    each = torch.arange(len(rows))
    for name in (*CONTEXTS, "query"):
        graph[name].x = tables.features[name][rows]
        graph[name].batch = each
        if name in tables.ids:
            graph[name].ids = tables.ids[name][rows]
    graph["query"].y = tables.target[rows]
    graph["query"].group = tables.group[rows]
    graph.num_graphs = len(rows)

    length = tables.position[rows].long().clamp(max=source.history)
    of = torch.repeat_interleave(each, length)
    total = torch.arange(len(of))
    place = total - (length.cumsum(0) - length)[of]
    balls = (rows - length)[of] + place
    graph["ball"].x = tables.features["ball"][balls]
    graph["ball"].ids = tables.ids["ball"][balls]
    graph["ball"].batch = of

    def connect(kind: tuple[str, str, str], from_: Tensor, to: Tensor, *back: Tensor) -> None:
        if kind[1] in source.left_out:
            from_, to, back = from_[:0], to[:0], tuple(distance[:0] for distance in back)
        graph[kind].edge_index = torch.stack([from_, to])
        for distance in back:
            graph[kind].edge_attr = _scaled(distance)

    connect(("match", "frames", "ball"), of, total)
    steps = [total[place >= step] for step in PRECEDES]
    from_ = torch.cat([to - step for to, step in zip(steps, PRECEDES, strict=True)])
    to = torch.cat(steps)
    connect(("ball", "precedes", "ball"), from_, to, to - from_)
    for name in SAME:
        back = tables.back[name][balls].long()
        to = ((back > 0) & (back <= place)).nonzero().squeeze(1)
        connect(("ball", name, "ball"), to - back[to], to, back[to])
    met, now = tables.players[balls], tables.players[rows]
    for kind, then, here in zip(PLAYER_EDGES, (0, 0, 2), (0, 1, 2), strict=True):
        same = (met[:, then] == now[:, here][of]).nonzero().squeeze(1)
        connect(kind, same, of[same])
    connect(("ball", "before", "query"), total, of, length[of] - place)
    for name in CONTEXTS:
        connect((name, "informs", "query"), each, each)
    return graph


def _scaled(distance: Tensor) -> Tensor:
    """Return distances in balls (edges,) on a scale of 0 to 1 (edges, 1), fine for the small."""
    return (torch.log(distance.float()) / torch.log(torch.tensor(_LONGEST))).unsqueeze(1)
