"""A model so small that preparing its input takes longer than training it."""

from torch import Tensor, nn


class SimpleModel(nn.Module):
    """Map images (batch, 1, 28, 28) to logits (batch, 10): 784-128-10."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        return self.fc2(self.fc1(images.flatten(1)).relu())
