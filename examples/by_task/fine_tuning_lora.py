"""Fine-tune a pretrained language model with LoRA (Hu et al., 2022): few weights are trained."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attention

from samestep import Recipe, Splits

WORDS, WIDTH, LENGTH = 16, 32, 24


def texts(number: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return texts (number, 24) and the next words: most are the word before plus a step."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(WORDS, (number, LENGTH + 1), generator=generator)
    steps[torch.rand(steps.shape, generator=generator) < 0.9] = step
    words = steps.cumsum(dim=1) % WORDS
    return words[:, :-1], words[:, 1:]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)  # of the attention, as in GPT-2
        self.net = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        x = self.word(words) + self.place.weight[: words.shape[1]]
        return self.net(x + attention(*self.qkv(x).chunk(3, dim=2), is_causal=True)).mT


class LoRA(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer, self.up = layer, nn.Parameter(torch.zeros(layer.out_features, rank))
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def model() -> nn.Module:
    """Return a pretrained model with LoRA: trained here, yours comes from a file."""
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for inputs, targets in zip(*(one.split(50) for one in texts(5000, 2, step=1)), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.qkv = LoRA(model.requires_grad_(False).qkv)
    return model


recipe = Recipe(
    model=model,
    data=lambda: Splits(train=texts(1000, 0, step=2), validation=texts(200, 1, step=2)),
    metrics={"right": lambda outputs, words: (outputs.argmax(1) == words).float().mean(1)},
    settings={"epochs": 6, "batch_size": 32, "lr": 0.02},
)
