"""Classify sentences of any length: padded in each batch, with a mask in a transformer."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from samestep import Recipe, Splits

WORDS = ("<padding>", "not", "good", "great", "bad", "dull", "film", "plot", "the", "was", "very")
PADDING, NOT, GOOD, BAD, LONGEST = 0, 1, (2, 3), (4, 5), 16
Sample = tuple[Tensor, Tensor]


def review(seed: int) -> Sample:
    """Return a sentence, and whether it praises; "not" somewhere before turns the word around."""
    generator = torch.Generator().manual_seed(seed)
    praise, turned = torch.randint(2, (2,), generator=generator)
    length = int(torch.randint(4, LONGEST + 1, (), generator=generator))
    words = torch.randint(6, len(WORDS), (length,), generator=generator)
    first, then = torch.randperm(length, generator=generator)[:2].sort().values
    words[then] = torch.tensor(GOOD if praise else BAD)[int(first) % 2]
    if turned:
        words[first] = NOT
    return words, praise ^ turned


def collate(samples: list[Sample]) -> Sample:
    sentences, labels = zip(*samples, strict=True)
    return pad_sequence(sentences, batch_first=True), torch.stack(labels)


class Classifier(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.word = nn.Embedding(len(WORDS), width, padding_idx=PADDING)
        self.place = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        padding = words == PADDING
        places = torch.arange(words.shape[1], device=words.device)
        hidden = self.word(words) + self.place(places)
        hidden = self.encoder(hidden, src_key_padding_mask=padding)
        hidden = hidden.masked_fill(padding[:, :, None], 0.0)
        return self.head(hidden.sum(dim=1) / (~padding).sum(dim=1, keepdim=True))


recipe = Recipe(
    model=Classifier,
    data=lambda: Splits(
        train=[review(seed) for seed in range(1500)],
        validation=[review(seed) for seed in range(10_000, 10_300)],
        classes=("bad", "good"),
    ),
    collate=collate,
    accepts=("dropout",),
    settings={"epochs": 5, "batch_size": 32, "lr": 3e-3, "optimizer": "adamw"},
)
