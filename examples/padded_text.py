"""Sentences of different lengths: padded batch by batch, and a loss whose mean is over words.

    samestep train examples/padded_text.py --nproc 2
    samestep predict runs/ID beginnings.txt

A mean over sentences would weigh a word of a short sentence more than one of a long sentence, and a
mean of the ranks' means would weigh it differently on each number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from samestep import Recipe, Splits

WORDS = ["<pad>", "<start>", "the", "a", "cat", "dog", "bird", "sees", "hears", "and", "often", "."]
AFTER = {  # which words may follow a word
    "<start>": ["the", "a"],
    "the": ["cat", "dog", "bird"],
    "a": ["cat", "dog", "bird"],
    "cat": ["sees", "hears", "often", "and", "."],
    "dog": ["sees", "hears", "often", "and", "."],
    "bird": ["sees", "hears", "often", "and", "."],
    "often": ["sees", "hears"],
    "sees": ["the", "a"],
    "hears": ["the", "a"],
    "and": ["the", "a"],
}


class Sentences(Dataset[Tensor]):
    """Random sentences of a small grammar: each a vector of words, from 5 to some 40 of them."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sentences = [self._sentence(generator) for _ in range(number)]

    def _sentence(self, generator: torch.Generator) -> Tensor:
        words = ["<start>"]
        while words[-1] != ".":
            choices = AFTER[words[-1]]
            words.append(choices[int(torch.randint(len(choices), (), generator=generator))])
        return torch.tensor([WORDS.index(word) for word in words])

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> Tensor:
        return self.sentences[index]


def collate(sentences: list[Tensor]) -> dict[str, Tensor]:
    """Return words and the words that follow them: (batch, longest), 0 where a sentence is over."""
    padded = pad_sequence(sentences, batch_first=True)
    return {"words": padded[:, :-1], "following": padded[:, 1:]}


class NextWord(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(WORDS))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(words))[0])


@dataclass(frozen=True)
class Options:
    width: int = 24
    num_sentences: int = 509


def data(options: Options) -> Splits:
    train, validation = Sentences(options.num_sentences, seed=0), Sentences(101, seed=1)
    return Splits(train=train, validation=validation)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs.transpose(1, 2), batch["following"], ignore_index=0)


def ended(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return 1 for each sentence of which most words are the most probable ones."""
    right = (outputs.argmax(dim=2) == batch["following"]) & (batch["following"] != 0)
    return right.sum(dim=1) * 2 > (batch["following"] != 0).sum(dim=1)


def read(_: Options, path: Path) -> Iterator[Tensor]:
    """Yield the beginnings of sentences in a file, one a line; a full stop takes up the guess."""
    for line in path.read_text().splitlines():
        yield torch.tensor([WORDS.index(word) for word in ("<start>", *line.split(), ".")])


def show(outputs: Tensor, batch: dict[str, Tensor]) -> list[dict[str, object]]:
    """Say of each beginning which word follows: only there, not where others are longer."""
    last = (batch["following"] != 0).sum(dim=1) - 1
    best = outputs[torch.arange(len(last)), last].softmax(dim=1).max(dim=1)
    pairs = zip(best.indices, best.values, strict=True)
    return [{"next": WORDS[word], "probability": float(p)} for word, p in pairs]


recipe = Recipe(
    model=lambda options: NextWord(options.width),
    data=data,
    options=Options,
    collate=collate,
    forward=lambda model, batch: model(batch["words"]),
    loss=loss,
    loss_terms=lambda batch: (batch["following"] != 0).sum(),
    metrics={"mostly_right": ended},
    read=read,
    show=show,
    settings={"epochs": 3, "batch_size": 16, "lr": 0.01},
)
