"""ResNet-18 for images of any size: a small stem for 32 x 32, ImageNet's for large ones.

He, Zhang, Ren & Sun (2016), "Deep residual learning for image recognition". Modules are named as in
torchvision, so weights of its `resnet18` load into the large stem.
"""

from collections import OrderedDict
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name everywhere

Stem = Literal["small", "large"]


def resnet18(num_classes: int, *, stem: Stem, width: int = 64) -> nn.Module:
    """Return an untrained ResNet-18 that maps (batch, 3, height, width) to (batch, num_classes).

    Weights are initialised as in He et al. (2015), "Delving deep into rectifiers": normal, with a
    variance of 2 / (outputs of the filter) for convolutions.

    Args:
        num_classes: logits for each image.
        stem: "small", a 3 x 3 convolution that keeps the size (section 4.2 of the paper), for
            images of about 32 x 32; "large", a 7 x 7 one of stride 2 and a max-pool that together
            divide each side by 4 (table 1), for about 224 x 224.
        width: channels of the first stage, doubled at each of the three others; 64 in the paper.

    Raises:
        ValueError: there is no such stem.
    """
    if stem not in ("small", "large"):
        raise ValueError(f"stem is {stem!r}; it must be 'small' or 'large'.")
    large = stem == "large"
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, width, 7, 2, 3, bias=False) if large else _conv3x3(3, width, 1),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, 2, 1) if large else nn.Identity(),
        layer1=_stage(width, width, stride=1),
        layer2=_stage(width, 2 * width, stride=2),
        layer3=_stage(2 * width, 4 * width, stride=2),
        layer4=_stage(4 * width, 8 * width, stride=2),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(8 * width, num_classes),
    )
    network = nn.Sequential(layers)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


class BasicBlock(nn.Module):
    """Add to the input what two convolutions make of it."""

    checkpoint_activations = True
    """--checkpoint-activations recomputes this block's activations in the backward pass."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels_in, channels, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels, 1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                _Pointwise(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Return maps (batch, channels, height / stride, width / stride)."""
        maps = self.relu(self.bn1(self.conv1(images)))
        maps = self.bn2(self.conv2(maps))
        out: Tensor = self.relu(maps + self.downsample(images))
        return out


class _Pointwise(nn.Conv2d):
    """A 1 x 1 convolution with a stride; on a CPU without one, of the pixels that it would leave.

    oneDNN's own with a stride, which PyTorch 2.13 calls, can crash in its backward pass.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - Conv2d's own name
        """Return maps (batch, channels, ⌈height / stride⌉, ⌈width / stride⌉)."""
        if input.device.type != "cpu":
            return super().forward(input)
        # A mean of one pixel. A slice would do, but its gradient is never channels-last, and what
        # it is added to then changes its layout, too.
        return F.conv2d(F.avg_pool2d(input, 1, self.stride), self.weight)


def _conv3x3(channels_in: int, channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)


def _stage(channels_in: int, channels: int, *, stride: int) -> nn.Sequential:
    # Four stages of two blocks of two convolutions, the stem and the classifier: 18.
    return nn.Sequential(
        BasicBlock(channels_in, channels, stride), BasicBlock(channels, channels, 1)
    )
