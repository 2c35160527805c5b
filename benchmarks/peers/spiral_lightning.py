"""Train the spiral with Lightning, all logging off."""

from common import BATCH_SIZE, mlp, options, spiral
from torch.utils.data import DataLoader, TensorDataset
from with_lightning import train

loader = DataLoader(TensorDataset(*spiral()), batch_size=BATCH_SIZE, shuffle=True)
train(mlp(), loader, options().epochs)
