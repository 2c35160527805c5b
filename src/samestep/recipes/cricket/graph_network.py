"""A graph network for a query in a graph of nodes of several types, with PyTorch Geometric.

Nodes are embedded, balls and players take part in rounds of messages, and in a last round all of
them report to the query. The prediction is read from the query and from the plain features of the
nodes that occur once per graph, so messages need only carry the rest.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

Convolution = Literal["gatv2", "transformer", "sage"]
"""Brody et al. (2022), Shi et al. (2021), Hamilton et al. (2017)."""
Edge = tuple[str, str, str]
_READ = 64
"""Channels of the layers that read the query."""


class BallGraphNetwork(nn.Module):
    """Graphs → one number each (graphs,).

    Args:
        features: type of node → its features.
        identities: type of node → the name of the vocabulary of each of its ids.
        vocabularies: name → number of entries, the unknown one among them.
        rounds: types of edges of each round but the last, in the order they are used.
        last: types of edges to the query.
        with_distance: types of edges that have a distance.
        beside: types of nodes, one a graph, whose features are read beside the query.
        convolution: what sends the messages.
        width: channels of a node.
        num_rounds: number of times that `rounds` are repeated.
        identity_width: numbers of an identity.
        dropout: within the layers that read the query.
        unknown: in training, the part of the identities that are taken for unknown ones; with 1
            none is ever used.
        centre: what is predicted to begin with, and `spread`: how far from it an output of 1 is.
    """

    def __init__(
        self,
        *,
        features: Mapping[str, int],
        identities: Mapping[str, Sequence[str]],
        vocabularies: Mapping[str, int],
        rounds: Sequence[Edge],
        last: Sequence[Edge],
        with_distance: frozenset[Edge],
        beside: Sequence[str],
        convolution: Convolution = "sage",
        width: int = 64,
        num_rounds: int = 1,
        identity_width: int = 16,
        unknown: float = 0.5,
        dropout: float = 0.1,
        centre: float = 35.0,
        spread: float = 15.0,
    ) -> None:
        super().__init__()
        self._identities, self._centre, self._spread = dict(identities), centre, spread
        self._beside = tuple(beside)
        self.inputs = nn.ModuleDict({n: nn.Linear(size, width) for n, size in features.items()})
        tables = {name: nn.Embedding(size, identity_width) for name, size in vocabularies.items()}
        for table in tables.values():
            nn.init.normal_(table.weight, std=0.1)
        self.embeddings = nn.ModuleDict(tables)
        # What a player means depends on the part he has.
        self.parts = nn.ModuleDict(
            {
                f"{node}_{place}": nn.Linear(identity_width, width, bias=False)
                for node, names in identities.items()
                for place, _name in enumerate(names)
            }
        )
        kinds = [tuple(rounds)] * num_rounds + [tuple(last)]
        self.layers = nn.ModuleList(
            _Messages(some, with_distance, convolution, width) for some in kinds
        )
        self._none_known = unknown == 1
        # Whether an identity is kept: a mask that is 0 or 1 / (1 - unknown).
        self.known = nn.Dropout(unknown)
        read = [width + sum(features[name] for name in beside), _READ, _READ]
        self.read = nn.Sequential(
            *(part for pair in pairwise(read) for part in _layer(*pair, dropout)),
            nn.Linear(_READ, 1),
        )

    def forward(self, graphs: Any) -> Tensor:
        """Return what is predicted for each graph (graphs,)."""
        nodes = {}
        for name, layer in self.inputs.items():
            x = layer(graphs[name].x)
            for place, vocabulary in enumerate(self._identities.get(name, ())):
                known = self.embeddings[vocabulary](self._some(graphs[name].ids[:, place]))
                x = x + self.parts[f"{name}_{place}"](known)
            nodes[name] = x.relu()
        for layer in self.layers:
            nodes = layer(nodes, graphs)
        plain = [graphs[name].x for name in self._beside]
        read: Tensor = self.read(torch.cat([nodes["query"], *plain], dim=1)).squeeze(1)
        return self._centre + self._spread * read

    def _some(self, ids: Tensor) -> Tensor:
        """Return identities, in training with a part of them unknown."""
        if self._none_known:
            return torch.zeros_like(ids)
        kept: Tensor = self.known(torch.ones(len(ids), device=ids.device))
        return ids * kept.bool()


def _layer(inputs: int, outputs: int, dropout: float) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)


class _Messages(nn.Module):
    """One round: each type of node adds what it is sent along each type of edge."""

    def __init__(
        self,
        kinds: Sequence[Edge],
        with_distance: frozenset[Edge],
        convolution: Convolution,
        width: int,
    ) -> None:
        super().__init__()
        self._kinds, self._with_distance = kinds, with_distance
        self._takes_distance = convolution != "sage"
        self.sent = nn.ModuleList(
            _convolution(convolution, width, kind in with_distance) for kind in kinds
        )
        self.norms = nn.ModuleDict(
            {to: nn.LayerNorm(width) for to in sorted({k[2] for k in kinds})}
        )

    def forward(self, nodes: dict[str, Tensor], graphs: Any) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for kind, layer in zip(self._kinds, self.sent, strict=True):
            from_, _, to = kind
            edges = graphs[kind]
            more: tuple[Tensor, ...] = ()
            if self._takes_distance and kind in self._with_distance:
                more = (edges.edge_attr,)
            message = layer((nodes[from_], nodes[to]), edges.edge_index, *more)
            sums[to] = sums[to] + message if to in sums else message
        changed = {to: (nodes[to] + self.norms[to](sum_)).relu() for to, sum_ in sums.items()}
        return {**nodes, **changed}


def _convolution(name: Convolution, width: int, has_distance: bool) -> nn.Module:
    from torch_geometric import nn as geometric  # noqa: PLC0415 - an extra

    both, heads = (width, width), 4
    if name == "sage":
        made: nn.Module = geometric.SAGEConv(both, width)
    else:
        kind = geometric.GATv2Conv if name == "gatv2" else geometric.TransformerConv
        more: dict[str, Any] = {"add_self_loops": False} if name == "gatv2" else {}
        distance = 1 if has_distance else None
        made = kind(both, width // heads, heads=heads, edge_dim=distance, **more)
    return made
