"""Train the ConvNet on two Gloo ranks with Lightning, which starts its second rank itself."""

from common import convnet, options
from images import Images
from torch.utils.data import DataLoader
from with_lightning import train

asked = options()
loader = DataLoader(Images(asked.data_dir), batch_size=64, shuffle=True)
train(convnet(), loader, asked.epochs, ranks=2)
