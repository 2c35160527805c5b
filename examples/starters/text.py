"""Predict a class from a sentence; sentences may have any length.

    samestep train NAME.py                    # train; the run goes into a folder in runs/
    samestep verify NAME.py                   # is it the same training on 1, 2 and 3 ranks?
    samestep train NAME.py --nproc 2          # the same training, shared by two processes
    samestep train NAME.py --help             # the settings, such as --lr 0.01
    samestep predict runs/ID FILE.txt         # the class of each line, from the best checkpoint

It trains at once, on sentences that it makes up. Change it from the top down.
"""

import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from samestep import Recipe, Splits

DATA_FILE: Path | None = None  # --- your data here --- such as Path("reviews.tsv")
CLASSES = ("bad", "good")
NUM_WORDS = 1000  # words are numbered by a hash: with too few numbers, different words share one
Sample = tuple[Tensor, int]


def labelled() -> list[tuple[str, str]]:
    """Return pairs (class, sentence); in each line of a file there is a tab between them."""
    if DATA_FILE is not None:
        lines = DATA_FILE.read_text().splitlines()
        return [(name, text) for name, _, text in (line.partition("\t") for line in lines)]
    made = []
    generator = torch.Generator().manual_seed(0)
    for draw in torch.randint(2**30, (1000,), generator=generator).tolist():
        is_good, is_denied = draw % 2, draw // 2 % 2
        subject = ("film", "plot", "music", "ending")[draw // 4 % 4]
        mood = (("bad", "dull", "weak"), ("good", "great", "fun"))[is_good][draw // 16 % 3]
        text = f"the {subject} was {'not ' * is_denied}{mood}{' and very long' * (draw // 48 % 3)}"
        made.append((CLASSES[is_good ^ is_denied], text))
    return made


def numbered(sentence: str) -> Tensor:
    """Return a number from 1 for each word; 0 is for the padding."""
    words = sentence.lower().split() or [""]
    return torch.tensor([1 + zlib.crc32(word.encode()) % (NUM_WORDS - 1) for word in words])


class Sentences(Dataset[Sample]):
    """Each sample: the numbers of the words (words,), and the place of the class."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.samples = [(numbered(text), CLASSES.index(name)) for name, text in pairs]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def data() -> Splits:
    """Hold out a tenth to choose the best epoch by. Mix the lines first if they are sorted."""
    pairs = labelled()
    train, validation = Sentences(pairs[len(pairs) // 10 :]), Sentences(pairs[: len(pairs) // 10])
    return Splits(train=train, validation=validation, classes=CLASSES)


def collate(samples: list[Sample]) -> tuple[dict[str, Tensor], Tensor]:
    """Return words (batch, longest), padded with 0, and where they are words, and the classes."""
    words = pad_sequence([words for words, _ in samples], batch_first=True)
    return {"words": words, "mask": words != 0}, torch.tensor([label for _, label in samples])


class Classifier(nn.Module):
    """Looks at each word with its neighbours; the strongest signs of a sentence decide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, width, padding_idx=0)
        self.neighbours = nn.Conv1d(width, width, kernel_size=3, padding=1)
        self.head = nn.Linear(width, len(CLASSES))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:  # the names in the batch's dict
        signs = self.neighbours(self.embedding(words).transpose(1, 2)).relu()
        # What padding shows does not count: a sentence means the same next to a longer one.
        return self.head((signs * mask[:, None, :]).amax(dim=2))


# Without `loss` it is the cross-entropy, and without `metrics` the accuracy.
recipe = Recipe(
    model=lambda: Classifier(width=32),
    data=data,
    collate=collate,
    # A sample needs a class, which such a file does not tell: any will do.
    read=lambda _, path: [(numbered(line), None) for line in path.read_text().splitlines()],
    show=lambda outputs, _: [{"class": CLASSES[place]} for place in outputs.argmax(dim=1)],
    # Defaults of the flags. The batch counts over all ranks, so that their number changes nothing.
    settings={"epochs": 8, "batch_size": 32, "lr": 3e-3},
)
