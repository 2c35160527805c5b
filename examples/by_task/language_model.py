"""A language model by truncated backpropagation: an LSTM reads on where the last step ended."""

import torch
from torch import Tensor, nn

from samestep import Recipe, Splits

WORDS, PIECE, WIDTH = 12, 16, 32


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
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Read on from the state that the piece before has left: two times (batch, 1, 32)."""
        first = tuple(one.transpose(0, 1).contiguous() for one in state)  # as LSTM wants it
        hidden, last = self.lstm(self.word(words), first)
        return self.head(hidden).mT, [one.transpose(0, 1) for one in last]


recipe = Recipe(
    model=LanguageModel,
    data=lambda: Splits(train=pieces(text(20_000, 0)), validation=pieces(text(4_000, 1))),
    carry=lambda rows: [torch.zeros(rows, 1, WIDTH), torch.zeros(rows, 1, WIDTH)],
    forward=lambda model, batch, state: model(batch[0], state),
    loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
    metrics={"right": lambda outputs, batch: (outputs.argmax(1) == batch[1]).float().mean(1)},
    settings={"order": "columns", "epochs": 6, "batch_size": 20, "lr": 0.01, "clip_norm": 1.0},
)
