"""Run directories written by hand: what is in them is known to the last digit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES, PER_EPOCH = 60, 6  # of an epoch; a global batch of 10 makes 6 steps of it
PHASES = dict.fromkeys(("to_device", "all_reduce"), 0.0)
PHASES |= {"data": 0.1, "forward": 0.3, "backward": 0.4, "optimizer": 0.1, "other": 0.1}


def write_run(
    path: Path,
    *,
    epochs: int = 3,
    global_batch: int = 10,
    ranks: int = 1,
    step_s: float = 0.5,
    loss: Callable[[int], float] = lambda step: 1 / step,
    accuracy: Callable[[int], float] | None = lambda epoch: 1 - 1 / (epoch + 1),
    phases: dict[str, float] | None = PHASES,
    recipe: str = "toy",
    finished: bool = True,
    **settings: Any,
) -> Path:
    """Write what a run would have: each step takes `step_s`, but thrice that in the first epoch."""
    path.mkdir(parents=True)
    per_epoch = -(-SAMPLES // global_batch)
    start = {"event": "start", "time": 0.0, "recipe": recipe, "run_dir": str(path)}
    start |= {"world_size": ranks, "num_samples": SAMPLES, "global_batch_size": global_batch}
    each = global_batch // ranks
    start |= {"micro_batch_size": each, "accumulate": 1, "steps_per_epoch": per_epoch}
    start |= {"epochs": epochs, "total_steps": epochs * per_epoch, "lr": 0.1, "device": "cpu"}
    start |= {"precision": "fp32", "threads": 1, "resumed": False, "notes": []}
    records: list[dict[str, Any]] = [start]
    seconds, samples = 0.0, 0
    for epoch in range(1, epochs + 1):
        pace = step_s * (3 if epoch == 1 else 1)
        for n in range(per_epoch):
            seconds += pace
            samples += min(global_batch, SAMPLES - n * global_batch)
            step = (epoch - 1) * per_epoch + n + 1
            made = {"event": "step", "step": step, "epoch": epoch, "loss": loss(step), "lr": 0.1}
            made |= {"grad_norm": 1.0, "samples": samples, "seconds": seconds}
            records.append(made | {"samples_per_s": global_batch / pace})
        took = pace * per_epoch
        more = {"phases": {k: v * took for k, v in phases.items()}} if phases else {}
        at = {"epoch": epoch, "step": epoch * per_epoch, "loss": loss(epoch * per_epoch)}
        rate = {"train_seconds": took, "samples_per_s": SAMPLES / took}
        records.append({"event": "epoch", **at, "samples": SAMPLES, **rate, **more})
        if accuracy is not None:
            found = {"accuracy": accuracy(epoch), "samples": 20, "seconds": 0.25}
            records.append({"event": "evaluation", "split": "validation", **at, **found})
        name = f"checkpoints/checkpoint_epoch_{epoch}.pt"
        records.append({"event": "checkpoint", "step": at["step"], "path": name, "seconds": 0.125})
    if finished:
        records.append({"event": "stop", "step": epochs * per_epoch, "reason": "finished"})
        result = {"recipe": recipe, "status": "completed", "reason": "finished"}
        (path / "result.json").write_text(json.dumps(result))
    (path / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    table = {"recipe": recipe, "lr": 0.1, "batch_size": global_batch, "epochs": epochs}
    table |= settings
    (path / "settings.toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    )
    (path / "environment.json").write_text(json.dumps({"versions": {"torch": "2.13"}}))
    return path


def lines_of(run: Path) -> list[str]:
    return (run / "events.jsonl").read_text().splitlines(keepends=True)


def append(run: Path, *records: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def change(run: Path, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Path:
    records = edit([json.loads(line) for line in lines_of(run)])
    (run / "events.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return run


def change_start(run: Path, **fields: Any) -> Path:
    return change(run, lambda records: [records[0] | fields, *records[1:]])


def evaluation(**values: Any) -> dict[str, Any]:
    return {"event": "evaluation", "split": "validation", "step": 18, **values}
