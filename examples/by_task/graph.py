"""Classify the nodes of graphs of any size; needs pip install 'samestep[graphs]'."""

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import SAGEConv, global_mean_pool

from samestep import Recipe, Splits


def communities(seed: int) -> Data:
    """Return a graph of 10 to 30 nodes in two groups: most edges stay within a group."""
    generator = torch.Generator().manual_seed(seed)
    nodes = int(torch.randint(10, 31, (), generator=generator))
    group = torch.randint(2, (nodes,), generator=generator)
    likely = torch.where(group[:, None] == group, 0.4, 0.04)
    upper = (torch.rand(nodes, nodes, generator=generator) < likely).triu(1)
    # One weak hint for each node: without its neighbours, two of three would be told right.
    hint = (2.0 * group - 1) + 2.0 * torch.randn(nodes, generator=generator)
    edges = (upper | upper.T).nonzero().T.contiguous()
    return Data(x=hint[:, None], edge_index=edges, y=group)


class SAGE(nn.Module):
    """Three layers of GraphSAGE, Hamilton et al. (2017)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SAGEConv(n, width) for n in (1, width, width))
        self.head = nn.Linear(width, 2)

    def forward(self, graphs: Batch) -> Tensor:
        x = graphs.x
        for layer in self.layers:
            x = layer(x, graphs.edge_index).relu()
        return self.head(x)


def accuracy(outputs: Tensor, graphs: Batch) -> Tensor:
    """Return the part of each graph's nodes that is right."""
    right = (outputs.argmax(dim=1) == graphs.y).float()[:, None]
    return global_mean_pool(right, graphs.batch, size=graphs.num_graphs).squeeze(1)


recipe = Recipe(
    model=SAGE,
    data=lambda: Splits(
        train=[communities(seed) for seed in range(400)],
        validation=[communities(seed) for seed in range(1000, 1100)],
    ),
    collate=Batch.from_data_list,
    forward=lambda model, graphs: model(graphs),
    loss=lambda outputs, graphs: nn.functional.cross_entropy(outputs, graphs.y),
    loss_terms=lambda graphs: graphs.num_nodes,
    metrics={"accuracy": accuracy},
    settings={"epochs": 5, "batch_size": 16, "lr": 5e-3},
)
