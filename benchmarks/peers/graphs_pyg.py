"""Read small graphs by PyG's own DataLoader. No model is trained: batches are all that is timed."""

from itertools import islice

from common import measure, options
from small_graphs import BATCH_SIZE, NUM_BATCHES, Graphs
from torch_geometric.loader import DataLoader

asked = options()
loader = DataLoader(
    Graphs(),
    batch_size=BATCH_SIZE,
    shuffle=True,
    num_workers=asked.workers,
    persistent_workers=asked.workers > 0,
)


def train_epoch(_epoch: int) -> int:
    return sum(batch.num_graphs for batch in islice(loader, NUM_BATCHES))


measure(train_epoch, asked.epochs)
