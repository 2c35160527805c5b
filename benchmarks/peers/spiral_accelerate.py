"""Train the spiral with Accelerate."""

from common import BATCH_SIZE, mlp, options, spiral
from torch.utils.data import DataLoader, TensorDataset
from with_accelerate import train

loader = DataLoader(TensorDataset(*spiral()), batch_size=BATCH_SIZE, shuffle=True)
train(mlp(), loader, options().epochs)
