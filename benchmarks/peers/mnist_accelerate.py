"""Train on IDX images with Accelerate, over the same per-sample Dataset as plain PyTorch."""

from common import BATCH_SIZE, options, simple_model
from images import Images
from torch.utils.data import DataLoader
from with_accelerate import train

asked = options()
loader = DataLoader(
    Images(asked.data_dir),
    batch_size=BATCH_SIZE,
    shuffle=True,
    num_workers=asked.workers,
    persistent_workers=asked.workers > 0,
)
train(simple_model(), loader, asked.epochs)
