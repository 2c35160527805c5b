"""Train on IDX images in plain PyTorch: a per-sample Dataset, a DataLoader with N workers."""

from common import BATCH_SIZE, options, simple_model
from images import Images
from plain import train
from torch.utils.data import DataLoader

asked = options()
loader = DataLoader(
    Images(asked.data_dir),
    batch_size=BATCH_SIZE,
    shuffle=True,
    num_workers=asked.workers,
    persistent_workers=asked.workers > 0,
)
train(simple_model(), loader, asked.epochs)
