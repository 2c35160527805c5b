#!/usr/bin/env bash
# timm's RandAugment ends with an error in one of some hundred images, since Pillow 13.
#
# `rand-m9-mstd0.5-inc1` is the RandAugment of most of timm's ImageNet recipes. The magnitude of
# each operation is drawn around 9 and cut at 10. At 10, Posterize with `inc1` keeps no bit of a
# colour: Pillow to 12.2 made a black image of it without a word, and Pillow 13.0 raises ValueError,
# as its `posterize` now takes 1 to 8 bits. So a training fails in its first epoch, at an image that
# is in order, and had black images before. Without `inc1`, no image of 20,000 fails.
#
# Seen: timm 1.0.31. Pillow 13.0.0: 31 of 20,000 images fail. 12.2.0: none fails, 29 become black.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numpy==2.2.6
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/timm" timm==1.0.31
cat >"$folder/draw.py" <<'PYTHON'
import importlib.util
import random
import sys

import numpy as np
from PIL import Image

# The file alone: the package would import torch and torchvision, and this part needs neither.
spec = importlib.util.spec_from_file_location("auto_augment", sys.argv[1])
auto_augment = importlib.util.module_from_spec(spec)
spec.loader.exec_module(auto_augment)


def counted(config):
    """Return how many of 20,000 images fail, and how many Posterize makes black."""
    random.seed(0)
    np.random.seed(0)
    failed = black = 0
    posterize = auto_augment.posterize

    def noted(image, bits, **more):
        nonlocal black
        out = posterize(image, bits, **more)
        black += bits == 0 and out.getextrema() == ((0, 0),) * 3
        return out

    for name in ("Posterize", "PosterizeIncreasing"):
        auto_augment.NAME_TO_OP[name] = noted
    transform = auto_augment.rand_augment_transform(config, {"translate_const": 100})
    image = Image.new("RGB", (32, 32), (250, 200, 150))
    for _ in range(20_000):
        try:
            transform(image)
        except ValueError:
            failed += 1
    for name in ("Posterize", "PosterizeIncreasing"):
        auto_augment.NAME_TO_OP[name] = posterize
    return failed, black


print(*counted("rand-m9-mstd0.5-inc1"), *counted("rand-m9-mstd0.5"))
PYTHON
for pillow in 12.2.0 13.0.0; do
    "$folder/venv/bin/pip" install --quiet "pillow==$pillow"
    seen=$("$folder/venv/bin/python" "$folder/draw.py" "$folder/timm/timm/data/auto_augment.py")
    echo "Pillow $pillow: failed, black with inc1, then without: $seen"
    read -r failed black failed_without _ <<<"$seen"
    test "$failed_without" = 0
    if [ "$pillow" = 13.0.0 ]; then
        test "$failed" -gt 0
    else
        test "$failed" = 0 && test "$black" -gt 0
    fi
done
