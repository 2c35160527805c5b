#!/usr/bin/env bash
# torch_checkpointing, as it comes, cannot save to ext4: its direct I/O falls back too early.
#
# Its storage opens each file with O_DIRECT, and takes ordinary I/O where the file system refuses
# that at the open. ext4 (XFS, too) lets a file be opened so, and then refuses each write whose memory
# or length is not a multiple of the disk's block, as those of `torch.save` are: the save ends with
# "Invalid argument". `LocalFileSystemStorageConfig(use_direct_io=False)` saves. In memory (tmpfs)
# both do, so a test in /dev/shm says nothing.
#
# Seen: torch_checkpointing 0.1.1, torch 2.13.0 (CPU), ext4, Linux 6.18. Skipped elsewhere.
set -euo pipefail
folder=$(mktemp -d --tmpdir="${FINDING_DIR:-/var/tmp}")
trap 'rm -rf "$folder"' EXIT
if [[ $(stat --file-system --format=%T "$folder") != ext2/ext3 ]]; then
    echo "skipped: $folder is not on ext4; name a folder that is: FINDING_DIR=…"
    exit 0
fi
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/pip" install --quiet torch_checkpointing==0.1.1
cat >"$folder/save.py" <<'PYTHON'
import logging
import sys
from pathlib import Path

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

logging.disable(logging.CRITICAL)
for direct in (True, False):
    storage = LocalFileSystemStorageConfig(use_direct_io=direct)
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
    path = Path(sys.argv[1], f"direct-{direct}")
    try:
        config.build().save(str(path), {"model": {"weight": torch.ones(3, 5)}})
        print(f"direct I/O {direct}: saved {[file.name for file in path.iterdir()]}")
    except OSError as error:
        print(f"direct I/O {direct}: {error.strerror}")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/save.py" "$folder/checkpoints" 2>/dev/null)
echo "$seen"
grep -q "direct I/O True: Invalid argument" <<<"$seen"
grep -q "direct I/O False: saved \['model_0.pt'\]" <<<"$seen"
grep -q "use_direct_io: bool = True" "$folder"/venv/lib/python3*/site-packages/torch_checkpointing/storage/filesystem.py
# direct I/O True: Invalid argument
# direct I/O False: saved ['model_0.pt']
