"""A model so small that preparing its input takes longer than training it."""

from torch import Tensor, nn


class SimpleModel(nn.Module):
    """Map images (batch, 1, 28, 28) to logits (batch, 10): 784 → 128 → 10."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10)."""
        pixels = images.flatten(1)  # (batch, 784), whatever the batch size
        hidden = self.relu(self.fc1(pixels))
        return self.fc2(hidden)
