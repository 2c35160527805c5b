"""Train ResNet-18 on the GPU as everyone begins: torchvision's transforms in a DataLoader.

Workers crop, flip and normalise one PIL image at a time; the training itself is that of
`gpu_resnet`: bf16, channels last, fused SGD.
"""

import torch
from common import DEVICE, measure, options
from images import torchvision_transforms
from PIL import Image
from resnet import resnet18, sgd, train_images
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

asked = options()
transforms = torchvision_transforms()


class Images(Dataset[tuple[Tensor, int]]):
    """CIFAR-10 as torchvision's own data set has it: arrays that become PIL images."""

    def __init__(self) -> None:
        images, labels = train_images(asked.data_dir)
        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def main() -> None:
    torch.backends.cudnn.benchmark = True
    network = resnet18(asked.width).to(DEVICE).train()
    optimizer = sgd(network)
    loader = DataLoader(
        Images(),
        batch_size=asked.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=asked.workers,
        persistent_workers=asked.workers > 0,
        pin_memory=DEVICE.type == "cuda",
    )

    def train_epoch(_epoch: int) -> int:
        for images, labels in loader:
            inputs = images.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = cross_entropy(network(inputs), labels.to(DEVICE, non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(loader) * asked.batch_size

    measure(train_epoch, asked.epochs)


if __name__ == "__main__":  # workers may import this file
    main()
