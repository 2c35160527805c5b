"""A Hugging Face model from a small configuration, not trained before; nothing is downloaded.

    pip install 'samestep[huggingface]'
    samestep train examples/huggingface.py
    samestep predict runs/ID sentences.txt

Sentences are good or bad, and "not" turns the word after it round. They are padded batch by batch.
"""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BatchEncoding,
    BertConfig,
    PreTrainedTokenizerFast,
)

from samestep import Recipe, Settings, Splits

GOOD, BAD = ["good", "great", "lovely", "fine"], ["bad", "awful", "dull", "poor"]
OTHERS = ["the", "film", "was", "very", "and", "plot", "quite", "so"]
WORDS = ["[PAD]", "[UNK]", "not", *GOOD, *BAD, *OTHERS]

_words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
_words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=_words, pad_token="[PAD]", model_max_length=32)


class Reviews(Dataset[tuple[str, int]]):
    """Random sentences of 3 to 12 words with one judgement in them: (text, 1 if it is good)."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.reviews = [self._review(generator) for _ in range(number)]

    def _review(self, generator: torch.Generator) -> tuple[str, int]:
        def below(n: int) -> int:
            return int(torch.randint(n, (), generator=generator))

        words = [OTHERS[below(len(OTHERS))] for _ in range(2 + below(9))]
        good, turned, place = below(2), below(2), below(len(words) + 1)
        judgement = (GOOD if good else BAD)[below(4)]
        words[place:place] = ["not", judgement] if turned else [judgement]
        return " ".join(words), good ^ turned

    def __len__(self) -> int:
        return len(self.reviews)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.reviews[index]


def collate(reviews: list[tuple[str, int]]) -> BatchEncoding:
    """Return `input_ids` and `attention_mask`, (batch, longest), and `labels`, (batch,)."""
    texts, labels = zip(*reviews, strict=True)
    batch = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    batch["labels"] = torch.tensor(labels)
    return batch


@dataclass(frozen=True)
class Options:
    num_reviews: int = 2003
    width: int = 32
    layers: int = 2


def model(options: Options) -> nn.Module:
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=2,
        intermediate_size=2 * options.width,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return AutoModelForSequenceClassification.from_config(config)


def forward(model: nn.Module, batch: BatchEncoding) -> Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model(**inputs).logits


def optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Decay matrices alone: no biases, and no weights of a normalisation."""
    weights = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, weight_decay=0.01)


def schedule(step: int, total: int) -> float:
    """Rise over the first tenth of the steps, then fall to 0."""
    warmup = max(1, total // 10)
    return min((step + 1) / warmup, (total - step) / (total - warmup + 1))


recipe = Recipe(
    model=model,
    data=lambda options: Splits(
        train=Reviews(options.num_reviews, seed=0),
        validation=Reviews(303, seed=1),
        classes=("bad", "good"),
    ),
    options=Options,
    collate=collate,
    forward=forward,
    loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["labels"]),
    metrics={"accuracy": lambda outputs, batch: outputs.argmax(dim=1) == batch["labels"]},
    optimizer=optimizer,
    schedule=schedule,
    read=lambda _, path: [(line, None) for line in path.read_text().splitlines()],
    settings={"epochs": 5, "batch_size": 32, "lr": 3e-3},
)
