"""Graphs of different sizes with PyTorch Geometric: collated by it, a graph network on top.

    pip install torch-geometric
    samestep train examples/graphs.py

The label of a graph says whether it has a triangle.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool

from samestep import Recipe, Splits


@dataclass(frozen=True)
class Options:
    num_graphs: int = 509
    width: int = 16


class RandomGraphs(Dataset[Data]):
    """Random graphs of 4 to 12 nodes; a node knows its degree and its closed walks of length 4."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.graphs = [self._graph(generator) for _ in range(number)]

    def _graph(self, generator: torch.Generator) -> Data:
        nodes = int(torch.randint(4, 13, (), generator=generator))
        upper = (torch.rand(nodes, nodes, generator=generator) < 2.0 / nodes).float().triu(1)
        adjacent = upper + upper.T
        walks = torch.linalg.matrix_power(adjacent, 4).diagonal()
        triangles = torch.linalg.matrix_power(adjacent, 3).trace()
        features = torch.stack([adjacent.sum(dim=0), walks / 10], dim=1)
        label = (triangles > 0).long().view(1)
        return Data(x=features, edge_index=adjacent.nonzero().T.contiguous(), y=label)

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Data:
        return self.graphs[index]


class GIN(nn.Module):
    """Two layers of Xu et al. (2019), "How powerful are graph neural networks?"."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [(2, width), (width, width)]
        self.layers = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))) for a, b in sizes
        )
        self.head = nn.Linear(width, 2)

    def forward(self, graphs: Batch) -> Tensor:
        x = graphs.x
        for layer in self.layers:
            x = layer(x, graphs.edge_index).relu()
        return self.head(global_add_pool(x, graphs.batch, size=graphs.num_graphs))


def accuracy(outputs: Tensor, graphs: Batch) -> Tensor:
    return outputs.argmax(dim=1) == graphs.y


recipe = Recipe(
    model=lambda options: GIN(options.width),
    data=lambda options: Splits(
        train=RandomGraphs(options.num_graphs, seed=0), validation=RandomGraphs(101, seed=1)
    ),
    options=Options,
    collate=Batch.from_data_list,
    forward=lambda model, graphs: model(graphs),
    loss=lambda outputs, graphs: nn.functional.cross_entropy(outputs, graphs.y),
    metrics={"accuracy": accuracy},
    settings={"epochs": 5, "batch_size": 32, "lr": 0.01},
)
