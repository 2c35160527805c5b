#!/usr/bin/env bash
# Hugging Face's Trainer with gradient accumulation: the gradient of models for classes, tokens and
# masked words is as many times too large as there are micro-batches.
#
# - The Trainer leaves out the division by `gradient_accumulation_steps` if the model's `forward`
#   takes further keyword arguments: it passes `num_items_in_batch`, and expects a sum over that.
# - Causal models compute that sum. BERT's heads and Llama's heads take the argument, do not hand it
#   on to their loss, and return a mean.
# - With 4 micro-batches of 2 samples, an SGD step is then 4 times that of one batch of 8, and the
#   logged loss, too. AdamW hides it, as it scales the gradient; clipping does not.
#
# Seen: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 accelerate==1.15.0
"$folder/venv/bin/pip" install --quiet transformers==5.23.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import accelerate
import torch
import transformers
from transformers import BertConfig, LlamaConfig, Trainer, TrainingArguments

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
SMALL |= {"intermediate_size": 16, "pad_token_id": 0, "num_labels": 3}
FLAGS = {"max_steps": 1, "learning_rate": 1.0, "max_grad_norm": 0, "lr_scheduler_type": "constant"}
FLAGS |= {"optim": "sgd", "weight_decay": 0.0, "report_to": [], "use_cpu": True, "seed": 0}
FLAGS |= {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}


def moved(kind, config, labels, size, accumulated):
    """Return how far a step moves the weights."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).clone()
    samples = [{"input_ids": TOKENS[n], "labels": labels[n]} for n in range(8)]
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
    Trainer(model, TrainingArguments("out", **FLAGS, **sizes), train_dataset=samples).train()
    return (torch.nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()


print("transformers", transformers.__version__, "accelerate", accelerate.__version__)
print("torch", torch.__version__)
TOKENS = torch.arange(1, 41).view(8, 5)
classes, undropped = torch.arange(8) % 3, {"hidden_dropout_prob": 0.0}
bert = BertConfig(**SMALL, **undropped, attention_probs_dropout_prob=0.0)
llama = LlamaConfig(**SMALL)
for kind, config, labels, times in (
    ("LlamaForCausalLM", llama, TOKENS, 1),
    ("LlamaForSequenceClassification", llama, classes, 4),
    ("BertForSequenceClassification", bert, classes, 4),
    ("BertForTokenClassification", bert, TOKENS % 3, 4),
    ("BertForMaskedLM", bert, TOKENS, 4),
):
    whole, parts = (moved(kind, config, labels, *sizes) for sizes in ((8, 1), (2, 4)))
    print(f"{kind}: {parts / whole:.3f} times the step of the whole batch")
    assert abs(parts / whole - times) < 0.01, kind
PYTHON
