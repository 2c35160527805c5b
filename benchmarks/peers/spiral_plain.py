"""Train the spiral in plain PyTorch: DataLoader over a TensorDataset, default Adam."""

from common import BATCH_SIZE, mlp, options, spiral
from plain import train
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(*spiral()), batch_size=BATCH_SIZE, shuffle=True)
train(mlp(), loader, options().epochs)
