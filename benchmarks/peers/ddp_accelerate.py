"""Train the ConvNet on two Gloo ranks with Accelerate; started by torchrun."""

from common import convnet, options
from images import Images
from torch.utils.data import DataLoader
from with_accelerate import train

asked = options()
train(convnet(), DataLoader(Images(asked.data_dir), batch_size=64, shuffle=True), asked.epochs)
