"""Hold 200,000 random graphs of 4 to 12 nodes and 8 to 24 edges, for both readers alike.

The tensors of all graphs are made at once and each graph has views of them: the start is short.
"""

import torch
from torch.utils.data import Dataset
from torch_geometric.data import Data

NUM_GRAPHS = 200_000
BATCH_SIZE = 128
NUM_BATCHES = 200
"""What is read in an epoch on the clock: the first batches in its order of all graphs."""


class Graphs(Dataset[Data]):
    """Graphs in memory, as a list of PyG's `Data`."""

    def __init__(self, number: int = NUM_GRAPHS) -> None:
        generator = torch.Generator().manual_seed(42)
        nodes = torch.randint(4, 13, (number,), generator=generator)
        edges = 2 * nodes
        ends = torch.rand(2, int(edges.sum()), generator=generator)
        links = (ends * nodes.repeat_interleave(edges)).long()
        features = torch.randn(int(nodes.sum()), 2, generator=generator)
        labels = torch.randint(2, (number,), generator=generator)
        parts = (features.split(nodes.tolist()), links.split(edges.tolist(), 1), labels.split(1))
        self.graphs = [Data(x=x, edge_index=e, y=y) for x, e, y in zip(*parts, strict=True)]

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Data:
        return self.graphs[index]
