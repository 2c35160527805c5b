#!/usr/bin/env bash
# Check or measure samestep on this machine's GPU, or try the same on the CPU with --dry:
#   bash tools/gpu.sh check [--dry]
#   bash tools/gpu.sh bench [PART] [--dry]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python3}" tools/gpu.py "$@"
