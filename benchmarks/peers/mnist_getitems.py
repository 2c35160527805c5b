"""Train on IDX images in plain PyTorch with a Dataset that loads whole batches."""

from common import BATCH_SIZE, options, simple_model
from images import BatchedImages, keep
from plain import train
from torch.utils.data import DataLoader

asked = options()
dataset = BatchedImages(asked.data_dir)
loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, collate_fn=keep)
train(simple_model(), loader, asked.epochs)
