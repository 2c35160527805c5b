"""A graph network for a query in a graph of nodes of several types, with PyTorch Geometric.

Nodes are embedded, balls and players take part in rounds of messages, and in a last round all of
them report to the query. The prediction is read from the query and from the plain features of the
nodes that occur once per graph, so messages need only carry the rest.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from samestep.core.recipes.cricket.graphs import BALL_EDGES, PLAYER_EDGES, QUERY_EDGES
from samestep.core.recipes.cricket.tables import CONTEXTS, IDENTITIES, NUM_FEATURES

Convolution = Literal["gatv2", "transformer", "sage"]
"""Brody et al. (2022), Shi et al. (2021), Hamilton et al. (2017)."""
Edge = tuple[str, str, str]
_READ = 64
"""Channels of the layers that read the query."""
_IDENTITY_WIDTH = 16
"""Numbers of an identity."""
_CENTRE, _SPREAD = 35.0, 15.0
"""What is predicted to begin with, and how far from it an output of 1 is."""
_BESIDE = (*CONTEXTS, "query")
"""Types of nodes, one a graph, whose features are read with the query."""


class BallGraphNetwork(nn.Module):
    """Graphs → one number each (graphs,).

    Args:
        vocabularies: name → number of entries, the unknown one among them.
        without: names of edges between balls and players that send no messages.
        convolution: what sends the messages.
        width: channels of a node.
        rounds: rounds of messages between balls and players, before the query reads them.
        dropout: within the layers that read the query.
        unknown: in training, the part of the identities that are taken for unknown ones; with 1
            none is ever used.
    """

    def __init__(
        self,
        *,
        vocabularies: dict[str, int],
        without: Sequence[str],
        convolution: Convolution,
        width: int,
        rounds: int,
        dropout: float,
        unknown: float,
    ) -> None:
        super().__init__()
        self.inputs = nn.ModuleDict({n: nn.Linear(k, width) for n, k in NUM_FEATURES.items()})
        tables = {n: nn.Embedding(size, _IDENTITY_WIDTH) for n, size in vocabularies.items()}
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.1)
        self.embeddings = nn.ModuleDict(tables)
        # What a player means depends on the part he has.
        self.parts = nn.ModuleDict(
            {
                f"{node}_{place}": nn.Linear(_IDENTITY_WIDTH, width, bias=False)
                for node, names in IDENTITIES.items()
                for place, _name in enumerate(names)
            }
        )
        kept = [kind for kind in (*BALL_EDGES, *PLAYER_EDGES) if kind[1] not in without]
        self.layers = nn.ModuleList(
            _Messages(kinds, convolution, width) for kinds in [kept] * rounds + [[*QUERY_EDGES]]
        )
        self._none_known = unknown == 1
        # Whether an identity is kept: a mask that is 0 or 1 / (1 - unknown).
        self.known = nn.Dropout(unknown)
        read = [width + sum(NUM_FEATURES[name] for name in _BESIDE), _READ, _READ]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(read):
            layers += nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)
        self.read = nn.Sequential(*layers, nn.Linear(_READ, 1))

    def forward(self, graphs: Any) -> Tensor:
        """Return the prediction for each graph (graphs,)."""
        nodes = {}
        for name, layer in self.inputs.items():
            x = layer(graphs[name].x)
            for place, vocabulary in enumerate(IDENTITIES.get(name, ())):
                ids = self._partly_unknown(graphs[name].ids[:, place])
                known = self.embeddings[vocabulary](ids)
                x = x + self.parts[f"{name}_{place}"](known)
            nodes[name] = x.relu()
        for layer in self.layers:
            nodes = layer(nodes, graphs)
        plain = [graphs[name].x for name in _BESIDE]
        read: Tensor = self.read(torch.cat([nodes["query"], *plain], dim=1)).squeeze(1)
        return _CENTRE + _SPREAD * read

    def _partly_unknown(self, ids: Tensor) -> Tensor:
        """Return identities, in training with a part of them unknown."""
        if self._none_known:
            return torch.zeros_like(ids)
        kept: Tensor = self.known(torch.ones(len(ids), device=ids.device))
        return ids * kept.bool()


class _Messages(nn.Module):
    """One round: each type of node adds what it is sent along each type of edge."""

    def __init__(self, kinds: Sequence[Edge], convolution: Convolution, width: int) -> None:
        super().__init__()
        self._kinds = kinds
        # GraphSAGE takes no distance.
        self._apart = [
            convolution != "sage" and kind[0] == "ball" and kind[2] in ("ball", "query")
            for kind in kinds
        ]
        self.sent = nn.ModuleList(_convolution(convolution, width, far) for far in self._apart)
        self.norms = nn.ModuleDict(
            {to: nn.LayerNorm(width) for to in sorted({k[2] for k in kinds})}
        )

    def forward(self, nodes: dict[str, Tensor], graphs: Any) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for kind, layer, apart in zip(self._kinds, self.sent, self._apart, strict=True):
            from_, _, to = kind
            edges = graphs[kind]
            more = (edges.edge_attr,) if apart else ()
            message = layer((nodes[from_], nodes[to]), edges.edge_index, *more)
            sums[to] = sums[to] + message if to in sums else message
        changed = {to: (nodes[to] + self.norms[to](sum_)).relu() for to, sum_ in sums.items()}
        return {**nodes, **changed}


def _convolution(name: Convolution, width: int, has_distance: bool) -> nn.Module:
    from torch_geometric import nn as geometric  # noqa: PLC0415 - an extra

    both = (width, width)
    heads = 4
    if name == "sage":
        return cast("nn.Module", geometric.SAGEConv(both, width))
    kind = geometric.GATv2Conv if name == "gatv2" else geometric.TransformerConv
    more: dict[str, Any] = {"add_self_loops": False} if name == "gatv2" else {}
    distance = 1 if has_distance else None
    return cast("nn.Module", kind(both, width // heads, heads=heads, edge_dim=distance, **more))
