#!/usr/bin/env bash
# safetensors writes a conjugated complex tensor without its conjugation.
#
# `x.conj()` computes nothing: PyTorch marks the new tensor as conjugated and shares the memory of x.
# safetensors looks at dtype, shape and contiguity, all of which are those of x, and writes the
# memory. What comes back has the wrong sign in each imaginary part. Spectral weights (FFT layers),
# eigenvectors and quantum states are saved this way; `x.H` and `x.mH` are marked, too, but as
# transposed tensors they are refused as not contiguous. torch.save keeps the mark.
# `x.resolve_conj()` before saving is right.
#
# Seen: safetensors 0.8.0, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 safetensors==0.8.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import safetensors
import torch
from safetensors.torch import load_file, save_file

weight = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
print("safetensors", safetensors.__version__, "torch", torch.__version__)
save_file({"weight": weight}, "a.safetensors")
save_file({"weight": weight.resolve_conj()}, "b.safetensors")
torch.save({"weight": weight}, "c.pt")
read, resolved, pickled = (
    load_file("a.safetensors")["weight"],
    load_file("b.safetensors")["weight"],
    torch.load("c.pt")["weight"],
)
print("saved:                      ", weight.tolist())
print("read from safetensors:      ", read.tolist())
print("with resolve_conj:          ", resolved.tolist())
print("read from torch.save's file:", pickled.tolist())
assert torch.equal(read, weight.conj()) and not torch.equal(read, weight)
assert torch.equal(resolved, weight) and torch.equal(pickled, weight)
PYTHON
# safetensors 0.8.0 torch 2.13.0+cpu
# saved:                       [(1-2j), (3+4j)]
# read from safetensors:       [(1+2j), (3-4j)]
# with resolve_conj:           [(1-2j), (3+4j)]
# read from torch.save's file: [(1-2j), (3+4j)]
