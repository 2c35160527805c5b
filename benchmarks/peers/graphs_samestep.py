"""Read small graphs as a recipe with `collate` does; no model is trained, as in `graphs_pyg`."""

from itertools import islice

import torch
from common import measure, options
from small_graphs import BATCH_SIZE, NUM_BATCHES, Graphs
from torch_geometric.data import Batch

from samestep.core.data.recipe_data import open_source
from samestep.launch.ranks.world import World

asked = options()
source = open_source(
    Graphs(),
    World(),
    seed=42,
    dtype=torch.float32,
    num_workers=asked.workers,
    collate=Batch.from_data_list,
    whole=True,
)


def train_epoch(epoch: int) -> int:
    blocks = source.blocks(epoch, 0, global_batch=BATCH_SIZE, drop_last=False)
    some = islice(blocks, NUM_BATCHES)
    return sum(part.inputs.num_graphs for block in some for part in block.parts)


measure(train_epoch, asked.epochs)
source.close()
