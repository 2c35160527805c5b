"""A small GPT on the characters of a text file; it has to beat counting pairs of characters.

    samestep train examples/char_gpt.py --text-file my_book.txt
    samestep train examples/char_gpt.py --dim 1024 --layers 16 --nproc 4 --strategy fsdp

Without a file it learns the sentences of padded_text.py.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from padded_text import WORDS, Sentences
from torch import Tensor, nn

from samestep import Recipe, Splits


@dataclass(frozen=True)
class Options:
    text_file: str = ""
    """A text in UTF-8; by default sentences are made up."""
    context: int = 32
    """Characters that the model sees at once."""
    dim: int = 64
    layers: int = 2
    heads: int = 4
    characters: str = ""
    """Those of the text, in order: filled in from it."""


def read_text(options: Options) -> str:
    if options.text_file:
        return Path(options.text_file).read_text(encoding="utf-8")
    sentences = Sentences(2000, seed=0).sentences
    return "\n".join(" ".join(WORDS[word] for word in one[1:]) for one in sentences)


def complete(options: Options) -> Options:
    """Return the options with the characters that there are: the model's size follows from them."""
    characters = options.characters or "".join(sorted(set(read_text(options))))
    return Options(**{**vars(options), "characters": characters})


class GPT(nn.Module):
    """Causal self-attention over characters, as in Radford et al. (2018), without dropout."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        vocabulary, dim = len(options.characters), options.dim
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(options.context, dim)
        layer = nn.TransformerEncoderLayer(
            dim, options.heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(options.context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of the next character: (batch, context, characters)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.token(tokens) + self.position(places)
        hidden = self.blocks(hidden, mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def bigram_loss(train: Tensor, validation: Tensor, vocabulary: int) -> float:
    """Return the loss of a model that counts which character follows which, and adds one."""
    counts = torch.ones(vocabulary, vocabulary, dtype=torch.float64)
    counts.index_put_((train[:-1], train[1:]), torch.tensor(1.0).double(), accumulate=True)
    log_probability = (counts / counts.sum(dim=1, keepdim=True)).log()
    return -float(log_probability[validation[:-1], validation[1:]].mean())


def data(options: Options) -> Splits:
    place = {character: number for number, character in enumerate(options.characters)}
    text = torch.tensor([place[character] for character in read_text(options)])
    kept = len(text) * 9 // 10
    bigram = bigram_loss(text[:kept], text[kept:], len(place))
    return Splits(
        train=windows(text[:kept], options.context),
        validation=windows(text[kept:], options.context),
        notes=(f"Counting pairs of characters has a validation loss of {bigram:.4f}.",),
    )


def windows(text: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut a text into pieces (samples, context), and into the characters that follow theirs."""
    number = (len(text) - 1) // context
    inputs, targets = text[: number * context], text[1 : number * context + 1]
    return inputs.view(number, context), targets.view(number, context)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


recipe = Recipe(
    model=GPT,
    data=data,
    options=Options,
    complete=complete,
    loss=loss,
    shard=(nn.TransformerEncoderLayer,),
    settings={
        "epochs": 5,
        "batch_size": 32,
        "optimizer": "adamw",
        "lr": 3e-3,
        "warmup_steps": 50,
        "schedule": "cosine",
        "clip_norm": 1.0,
    },
)
