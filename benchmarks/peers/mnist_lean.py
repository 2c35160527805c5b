"""Train on IDX images as `mnist_plain` does, with the leanest per-sample transform."""

from common import BATCH_SIZE, options, simple_model
from images import Images, lean
from plain import train
from torch.utils.data import DataLoader

asked = options()
loader = DataLoader(
    Images(asked.data_dir, lean),
    batch_size=BATCH_SIZE,
    shuffle=True,
    num_workers=asked.workers,
    persistent_workers=asked.workers > 0,
)
train(simple_model(), loader, asked.epochs)
