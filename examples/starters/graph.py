"""Predict a class from a graph, with PyTorch Geometric: pip install 'samestep[graphs]'.

    samestep train NAME.py                    # train; the run goes into a folder in runs/
    samestep verify NAME.py                   # is it the same training on 1, 2 and 3 ranks?
    samestep train NAME.py --nproc 2          # the same training, shared by two processes
    samestep train NAME.py --help             # the settings, such as --lr 0.01
    samestep predict runs/ID FILE.jsonl       # the class of each graph, from the best checkpoint

It trains at once, on graphs that it makes up. Change it from the top down.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool

from samestep import Recipe, Splits

DATA_FILE: Path | None = None  # --- your data here --- such as Path("graphs.jsonl"):
# in each line {"nodes": [[1], [1]], "edges": [[0, 1]], "label": 0}, edges between places of nodes
CLASSES = ("a tree", "with a ring")
NUM_FEATURES = 1  # how many numbers are known of each node


def graph(nodes: list[list[float]], edges: list[list[int]], label: int = 0) -> Data:
    x = torch.tensor(nodes, dtype=torch.float32).view(-1, NUM_FEATURES)
    pairs = torch.tensor(edges, dtype=torch.long).view(-1, 2).T  # each leads both ways
    return Data(x=x, edge_index=torch.cat([pairs, pairs.flip(0)], dim=1), y=torch.tensor([label]))


def read_graphs(path: Path) -> list[Data]:
    return [graph(**json.loads(line)) for line in path.read_text().splitlines()]


def made_up() -> list[Data]:
    """Return graphs of 6 to 11 nodes: each node hangs on an earlier one; an edge more is a ring."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for place in range(600):
        *draws, last = torch.rand(int(6 + place // 2 % 6), generator=generator).tolist()
        edges = [[int(draw * node), node] for node, draw in enumerate(draws, start=1)]
        free = [[a, b] for b in range(len(edges) + 1) for a in range(b) if [a, b] not in edges]
        edges += [free[int(last * len(free))]] * (place % 2)
        made.append(graph([[1.0]] * (len(draws) + 1), edges, place % 2))
    return made


class Graphs(torch.utils.data.Dataset[Data]):
    def __init__(self, graphs: list[Data]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Data:
        return self.graphs[index]


def data() -> Splits:
    """Hold out a sixth to choose the best epoch by. Mix the graphs first if they are sorted."""
    graphs = made_up() if DATA_FILE is None else read_graphs(DATA_FILE)
    sixth = len(graphs) // 6
    return Splits(train=Graphs(graphs[sixth:]), validation=Graphs(graphs[:sixth]), classes=CLASSES)


def collate(graphs: list[Data]) -> tuple[Batch, Tensor]:
    """Return one graph of many parts, and the class of each part."""
    batch = Batch.from_data_list(graphs)
    return batch, batch.y


class GraphNetwork(nn.Module):
    """Each layer adds up what the neighbours of a node know; in the end all nodes are added up."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        sizes = (NUM_FEATURES, wide, wide)
        nets = [nn.Sequential(nn.Linear(n, wide), nn.ReLU(), nn.Linear(wide, wide)) for n in sizes]
        self.layers = nn.ModuleList(GINConv(net) for net in nets)
        self.head = nn.Linear(wide, len(CLASSES))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index).relu()
        return self.head(global_add_pool(x, batch.batch, size=batch.num_graphs))


# Without `loss` it is the cross-entropy, and without `metrics` the accuracy.
recipe = Recipe(
    model=lambda: GraphNetwork(wide=16),
    data=data,
    collate=collate,
    read=lambda _, path: read_graphs(path),
    show=lambda outputs, _: [{"class": CLASSES[place]} for place in outputs.argmax(dim=1)],
    # Defaults of the flags. The batch counts over all ranks, so that their number changes nothing.
    settings={"epochs": 15, "batch_size": 32, "lr": 5e-3},
)
