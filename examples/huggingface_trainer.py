"""What a Hugging Face Trainer takes, trained by samestep: the last line replaces the Trainer.

    pip install 'samestep[huggingface]'
    samestep train huggingface_trainer.py

The model comes from a small configuration, not trained before; nothing is downloaded.
"""

import torch
from transformers import EvalPrediction, LlamaConfig, LlamaForCausalLM, TrainingArguments

import samestep.huggingface

PAD, LONGEST = 0, 16


def sequences(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return padded sequences that count on in steps of 1 to 3, modulo 20, from 1 on."""
    generator = torch.Generator().manual_seed(seed)
    starts, steps, lengths = (
        torch.randint(low, high, (number, 1), generator=generator)
        for low, high in ((0, 20), (1, 4), (6, LONGEST + 1))
    )
    places = torch.arange(LONGEST)
    tokens, there = 1 + (starts + steps * places) % 20, places < lengths
    return [
        {
            "input_ids": ids.where(mask, PAD),
            "attention_mask": mask.long(),
            "labels": ids.where(mask, -100),
        }
        for ids, mask in zip(tokens, there, strict=True)
    ]


def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LONGEST}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=21, pad_token_id=PAD, **sizes, **layers))


def compute_metrics(seen: EvalPrediction) -> dict[str, float]:
    """Return how many of the next tokens are right."""
    found, wanted = seen.predictions.argmax(-1)[:, :-1], seen.label_ids[:, 1:]
    return {"accuracy": (found == wanted)[wanted != -100].mean()}


args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    num_train_epochs=5,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=20,
    weight_decay=0.1,
    eval_strategy="epoch",
    save_strategy="epoch",
    metric_for_best_model="accuracy",
    load_best_model_at_end=True,
    report_to="none",
)
recipe = samestep.huggingface.recipe(
    model,
    args,
    train_dataset=sequences(2000, seed=0),
    eval_dataset=sequences(300, seed=1),
    compute_metrics=compute_metrics,
)
