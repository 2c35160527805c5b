#!/usr/bin/env bash
# Lightning writes another hparams.yaml, and reads back another type, where omegaconf is installed.
#
# `CSVLogger` and `TensorBoardLogger` keep a module's hyperparameters in hparams.yaml. Without
# omegaconf the names are sorted; with it, which any package may bring (Hydra does), they come in the
# order of the constructor. What `load_hparams_from_yaml` returns is a dict in one case and a
# DictConfig in the other, whose lists are no lists. So runs of the same code on two machines differ
# as files, and a check such as `isinstance(hparams["dims"], list)` holds on one of them.
#
# Seen: lightning 2.6.6, omegaconf 2.3.1, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/pip" install --quiet lightning==2.6.6
cat >"$folder/write.py" <<'PYTHON'
import sys
from pathlib import Path

from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers import CSVLogger

logger = CSVLogger(sys.argv[1], name="run")
logger.log_hyperparams({"width": 8, "dims": [16, 8], "lr": 0.1})
logger.save()
file = Path(logger.log_dir) / "hparams.yaml"
names = [line.partition(":")[0] for line in file.read_text().splitlines() if ":" in line]
read = load_hparams_from_yaml(str(file))
print(names, type(read).__name__, isinstance(read["dims"], list))
PYTHON
without=$("$folder/venv/bin/python" "$folder/write.py" "$folder/one")
"$folder/venv/bin/pip" install --quiet omegaconf==2.3.1
with=$("$folder/venv/bin/python" "$folder/write.py" "$folder/two")
echo "without omegaconf: $without"
echo "with omegaconf:    $with"
[[ $without == "['dims', 'lr', 'width'] dict True" ]]
[[ $with == "['width', 'dims', 'lr'] DictConfig False" ]]
# without omegaconf: ['dims', 'lr', 'width'] dict True
# with omegaconf:    ['width', 'dims', 'lr'] DictConfig False
