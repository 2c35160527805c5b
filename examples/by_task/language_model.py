"""A language model on a long text: an LSTM that reads it in pieces."""

import torch
from torch import Tensor, nn

from samestep import Recipe, Splits

WORDS, PIECE = 12, 16


def text(number: int, seed: int) -> Tensor:
    """Return words (number,): most follow from the one before and from a topic that lasts."""
    generator = torch.Generator().manual_seed(seed)
    topic = (torch.rand(number, generator=generator) < 0.01).cumsum(dim=0) % 4
    steps = torch.randint(WORDS, (number,), generator=generator)
    keeps = torch.rand(number, generator=generator) < 0.9
    return torch.where(keeps, 1 + 2 * topic, steps).cumsum(dim=0) % WORDS


def pieces(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return pieces of the text (pieces, 16) in its order, and the words that follow."""
    last = (len(words) - 1) // PIECE * PIECE
    return words[:last].view(-1, PIECE), words[1 : last + 1].view(-1, PIECE)


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.word(words))[0]).mT


recipe = Recipe(
    model=LanguageModel,
    data=lambda: Splits(train=pieces(text(20_000, 0)), validation=pieces(text(4_000, 1))),
    metrics={"right": lambda outputs, following: (outputs.argmax(1) == following).float().mean(1)},
    settings={"epochs": 6, "batch_size": 20, "lr": 0.01, "clip_norm": 1.0},
)
