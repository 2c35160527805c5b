"""Turn one sequence into another with a transformer: here the same digits, sorted."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from samestep import Recipe, Splits

PADDING, START, FIRST_DIGIT, SYMBOLS, LONGEST = 0, 1, 2, 12, 9


def pair(seed: int) -> tuple[Tensor, Tensor]:
    """Return 3 to 8 digits, and the same digits in order after a start symbol."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(3, LONGEST, (), generator=generator))
    digits = torch.randint(FIRST_DIGIT, SYMBOLS, (length,), generator=generator)
    return digits, torch.cat([torch.tensor([START]), digits.sort().values])


def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Pad both sides; the decoder is given the target's symbols and has to tell the next ones."""
    source, target = (pad_sequence(side, batch_first=True) for side in zip(*pairs, strict=True))
    return {"source": source, "given": target[:, :-1]}, target[:, 1:]


class Translator(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(SYMBOLS, width), nn.Embedding(LONGEST, width)
        self.net = nn.Transformer(width, 4, 1, 1, 4 * width, dropout=0.0, batch_first=True)
        self.net.encoder.use_nested_tensor = False  # it is a prototype, and warns
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, source: Tensor, given: Tensor) -> Tensor:
        """Return scores of the symbol after each given one: (batch, symbols, length)."""
        both = [self.symbol(side) + self.place.weight[: side.shape[1]] for side in (source, given)]
        later = torch.ones(given.shape[1], given.shape[1], device=given.device).triu(1).bool()
        padding = {f"{name}_key_padding_mask": source == PADDING for name in ("src", "memory")}
        return self.head(self.net(*both, tgt_mask=later, **padding)).mT


def right(outputs: Tensor, following: Tensor) -> Tensor:
    """Return the part of each target's symbols that is right."""
    counted = following != PADDING
    return ((outputs.argmax(dim=1) == following) & counted).sum(1) / counted.sum(1)


recipe = Recipe(
    model=Translator,
    data=lambda: Splits(
        train=[*map(pair, range(1500))], validation=[*map(pair, range(9000, 9100))]
    ),
    collate=collate,
    loss=partial(nn.functional.cross_entropy, ignore_index=PADDING),
    loss_terms=lambda batch: (batch[1] != PADDING).sum(),
    metrics={"right": right},
    settings={"epochs": 5, "batch_size": 32, "lr": 3e-3, "warmup_steps": 50},
)
