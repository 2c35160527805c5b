"""Measure how long a checkpoint blocks the training, beside what others do with the same state.

    python benchmarks/checkpoints.py [--mib 128,1024] [--rounds 7]

All write the same tensors to the same disk, in turn. Writes `benchmarks/results/checkpoints.md`.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from report import heading, machine
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from samestep.base.run import checkpoints
from samestep.base.run.index import Retention
from samestep.base.run.records import Record
from samestep.core.session.session import Session
from samestep.core.training.work import Position
from samestep.launch.ranks.world import World

PAGE = Path(__file__).parent / "results" / "checkpoints.md"
TENSORS = 32
MOST_MS, MOST_RATIO, LEAST_OF_DD = 70, 0.3, 0.8
"""The targets: of 128 MiB, of 1 GiB over torch.save, and in the background over dd."""


@dataclass(frozen=True)
class Way:
    """One way to save; `save` returns what waits until all is on the disk."""

    name: str
    save: Callable[[Path, int], Callable[[], object]]


def main() -> int:
    """Measure, write the page, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", default="128,1024", help="sizes of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a temporary")
    parser.add_argument("--device", default="cpu", help="where the tensors are")
    parser.add_argument("--way", help="measure one, and print one line of JSON in place of a page")
    asked = parser.parse_args()
    facts = machine()
    rows, missed = [], []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        for size in map(int, asked.mib.split(",")):
            with tempfile.TemporaryDirectory(dir=asked.folder) as place:
                rows = size * 2**20 // 4 // TENSORS
                model = {
                    f"weight {n}": torch.randn(rows, device=asked.device) for n in range(TENSORS)
                }
                names = [asked.way] if asked.way else None
                blocked, whole = measure(Path(place), model, asked.rounds, names, size)
            if asked.way:
                seconds = {"blocked_s": blocked[asked.way], "until_on_disk_s": whole[asked.way]}
                print(json.dumps({name: statistics.median(s) for name, s in seconds.items()}))
                continue
            lines, failed = _judge(size, blocked, whole)
            print("\n".join(lines), flush=True)
            rows += lines
            missed += failed
        dist.destroy_process_group()
    if asked.way:
        return 0
    lines = [
        *heading("Checkpoints: how long one blocks the training", facts),
        "| MiB | way | blocked, ms (min-max) | over torch.save | until it is on the disk, s |",
        "|---:|---|---:|---:|---:|",
        *rows,
        "",
        f"- Targets: blocked {MOST_MS} ms at most for 128 MiB, {MOST_RATIO} x torch.save for",
        "  1 GiB, and less than each of the others; then it writes and hashes at",
        f"  {LEAST_OF_DD} x dd's speed or more: {'; '.join(missed) if missed else 'reached'}.",
        f"- Medians of {asked.rounds} rounds after one to warm up, all ways in turn, to new files.",
        "- torch.save and dd sync their file; Lightning and DCP write as they do by default.",
        "- samestep also hashes the file, syncs it, renames it, and names it in the index.",
    ]
    PAGE.write_text("\n".join([*lines, ""]))
    return 1 if missed else 0


Times = dict[str, list[float]]
"""Of each way the seconds of each round."""


def measure(
    folder: Path,
    model: dict[str, torch.Tensor],
    rounds: int,
    names: Collection[str] | None = None,
    mib: int = 1,
    *,
    warm: bool = True,
) -> tuple[Times, Times]:
    """Return how long each way blocks, or those named, and until all is on the disk.

    With `warm`, a first round is not counted. `mib` is what dd writes.
    """
    state: dict[str, Any] = {"format": checkpoints.FORMAT, "model": model}
    ways = [way for way in _ways(folder, state, mib) if names is None or way.name in names]
    blocked: dict[str, list[float]] = {way.name: [] for way in ways}
    whole: dict[str, list[float]] = {way.name: [] for way in ways}
    for turn in range(not warm, rounds + 1):
        for way in ways if turn % 2 else reversed(ways):  # a disk may be slower after a write
            if next(iter(model.values())).is_cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            finish = way.save(folder, turn)
            stopped = time.perf_counter() - began
            finish()
            if turn:
                blocked[way.name].append(stopped)
                whole[way.name].append(time.perf_counter() - began)
            os.sync()  # what one has left to the kernel is not written in another's time
    return blocked, whole


def _judge(mib: int, blocked: Times, whole: Times) -> tuple[list[str], list[str]]:
    """Return the rows of the page, and the targets that were missed."""
    plain = statistics.median(blocked["torch.save + fsync"])
    lines = []
    for name in blocked:
        times, until = sorted(blocked[name]), statistics.median(whole[name])
        middle = statistics.median(times)
        spread = f"{middle * 1e3:.0f} ({times[0] * 1e3:.0f}-{times[-1] * 1e3:.0f})"
        lines.append(f"| {mib} | {name} | {spread} | {middle / plain:.2f} | {until:.2f} |")
    ours = statistics.median(blocked["samestep"])
    others = min(statistics.median(blocked[n]) for n in blocked if n not in ("samestep", "dd"))
    rate = statistics.median(whole["dd"]) / (statistics.median(whole["samestep"]) - ours)
    lines.append(f"| {mib} | samestep's thread over dd | {rate:.2f} x its speed | | |")
    failed = [f"{mib} MiB: missed, {ours * 1e3:.0f} ms"] * (mib <= 128 and ours > MOST_MS / 1e3)
    failed += [f"{mib} MiB: missed, {ours / plain:.2f} x"] * (
        mib > 128 and ours > MOST_RATIO * plain
    )
    failed += [f"{mib} MiB: another blocks less"] * (others < ours)
    failed += [f"{mib} MiB: missed, {rate:.2f} x dd"] * (rate < LEAST_OF_DD)
    return lines, failed


def _ways(folder: Path, state: dict[str, Any], mib: int) -> list[Way]:
    """Return all ways; each writes to a name of its own in each round."""
    session = Session(folder / "run", World(), lambda _: None)
    start: Record = {"event": "start", "resumed": False, "world_size": 1}
    session.begin(start, None, 0, None)
    plain, behind = TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO())

    def ours(_folder: Path, turn: int) -> Callable[[], object]:
        began, keep = time.perf_counter(), {"watch": None, "retention": Retention(top_k=1)}
        session.saver.save(state, Position(step=turn), metric=None, began=began, sync=False, **keep)
        return session.saver.settle_well

    def by_torch(folder: Path, turn: int) -> Callable[[], object]:
        path = folder / f"plain-{turn}.pt"
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return path.unlink

    def by_lightning(folder: Path, turn: int) -> Callable[[], object]:
        path = folder / f"lightning-{turn}.ckpt"
        plain.save_checkpoint(state, path)
        return path.unlink

    def by_lightning_behind(folder: Path, turn: int) -> Callable[[], object]:
        behind.save_checkpoint(state, folder / f"behind-{turn}.ckpt")
        return behind.teardown

    def by_dcp(folder: Path, turn: int) -> Callable[[], object]:
        dcp.save(state, checkpoint_id=folder / f"dcp-{turn}")
        return lambda: None

    def by_dcp_behind(folder: Path, turn: int) -> Callable[[], object]:
        found = dcp.async_save(state, checkpoint_id=folder / f"async-{turn}")
        return found.result

    def by_dcp_process(folder: Path, turn: int) -> Callable[[], object]:
        kind = AsyncCheckpointerType.PROCESS
        place = folder / f"process-{turn}"
        found = dcp.async_save(state, checkpoint_id=place, async_checkpointer_type=kind)
        return found.result

    def by_dd(folder: Path, turn: int) -> Callable[[], object]:
        words = ["dd", "if=/dev/zero", f"of={folder}/dd-{turn}", "bs=1M", f"count={mib}"]
        subprocess.run([*words, "conv=fsync", "status=none"], check=True)
        return (folder / f"dd-{turn}").unlink

    return [
        Way("torch.save + fsync", by_torch),
        Way("samestep", ours),
        Way("Lightning", by_lightning),
        Way("Lightning, AsyncCheckpointIO", by_lightning_behind),
        Way("DCP, save", by_dcp),
        Way("DCP, async_save", by_dcp_behind),
        Way("DCP, async_save in a process", by_dcp_process),
        *_by_torch_checkpointing(state),
        Way("dd", by_dd),
    ]


def _by_torch_checkpointing(state: dict[str, Any]) -> list[Way]:
    """Return PyTorch's newest package for this, if it is installed; its process lives on."""
    if importlib.util.find_spec("torch_checkpointing") is None:
        return []

    @cache
    def manager() -> Any:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage import filesystem

        # Without CUDA as its page on troubles says; ext4 refuses its direct I/O (findings/).
        staging = CheckpointStagerConfig(use_async_staging=torch.cuda.is_available())
        storage = filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
        save = AsyncCheckpointSaverConfig(staging_config=staging)
        return CheckpointManager.Config(save=save, storage_config=storage).build()

    def by_it(folder: Path, turn: int) -> Callable[[], object]:
        saved = manager().save(str(folder / f"its-{turn}"), {"model": state["model"]})
        waits: Callable[[], object] = saved.result
        return waits

    return [Way("torch_checkpointing", by_it)]


if __name__ == "__main__":
    raise SystemExit(main())
