"""Train a graph network on cricket, ball by ball, with DistributedDataParallel (DDP) by hand.

    python train.py --synthetic                                   # one process
    torchrun --nproc_per_node=gpu train.py --data-dir MATCHES     # all GPUs of this machine
    torchrun --nproc_per_node=gpu train.py --data-dir MATCHES --resume
    python train.py --data-dir MATCHES --test-only                # the best checkpoint, one device

samestep reads the matches, builds the graphs and defines the network; everything else is here. The
script validates and saves after each epoch. At the end it tests the best network on all ranks.
"""

import argparse
import contextlib
import datetime as dt
import gc
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from samestep import UserError
from samestep.recipes.cricket import recipe as cricket
from samestep.recipes.cricket.graphs import collate

T = TypeVar("T")
Batches = Iterable[tuple[Any, float]]  # graphs, and the learning rate of their step
MISTAKES = (UserError, OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError)


class Ranks(NamedTuple):
    """This process among the others, and its device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


class Job(NamedTuple):
    """What is trained, with what, and where."""

    arguments: argparse.Namespace
    ranks: Ranks
    options: cricket.CricketOptions
    parts: dict[str, Dataset[Any]]
    network: nn.Module


# --- The ranks --------------------------------------------------------------------------------


def setup_distributed(timeout_s: float) -> Ranks:
    """Join the ranks that torchrun started; a process started without it is rank 0 of 1."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    rank, local_rank, world_size = (int(os.environ.get(n, names[n])) for n in names)
    ranks = Ranks(rank, local_rank, world_size, choose_device(local_rank, world_size))
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    nccl = ranks.device.type == "cuda" and sys.platform == "linux"
    if world_size > 1:
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            timeout=dt.timedelta(seconds=timeout_s),
            device_id=ranks.device if nccl else None,
        )
    if world_size > 1 and ranks.device.type == "cpu" and torch.backends.mps.is_available():
        say(f"warning: a Mac has one GPU. {world_size} ranks train on its CPU and gain nothing.")
    return ranks


def choose_device(local_rank: int, world_size: int) -> torch.device:
    """Return the GPU with this rank's number on its node; else Apple's GPU; else the CPU."""
    if torch.cuda.is_available():
        wanted, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if wanted > there:
            refuse(f"{wanted} ranks on a node with {there} visible GPUs; --nproc_per_node=gpu.")
        return torch.device("cuda", local_rank)
    if torch.backends.mps.is_available() and world_size == 1:
        return torch.device("mps")  # one process only: Gloo cannot reduce tensors on it
    return torch.device("cpu")


def leave() -> None:
    """Leave the process group. The DDP model must be gone by now."""
    if dist.is_initialized():
        gc.collect()  # DDP is part of a reference cycle: only the collector frees it
        dist.barrier()  # no rank exits while another still talks to it
        dist.destroy_process_group()


def refuse(message: str) -> NoReturn:
    """End with exit code 2 and one message. All ranks call this; the first of each node prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"train.py: {message}", file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):  # wait: torchrun kills the others when one has ended
        if "RANK" in os.environ and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=dt.timedelta(seconds=30))
        leave()
    sys.exit(2)


def on_every_rank(function: Callable[[], T]) -> T:
    """Return what the function returns. If it fails on any rank, end all ranks together."""
    value, problem = None, None
    try:
        value = function()
    except (*MISTAKES, pickle.PickleError) as error:
        problem = str(error) or type(error).__name__
    problems: list[Any] = [problem]
    if dist.is_initialized():
        problems *= dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text:
            refuse(text if all(problems) else f"[rank {rank}] {text}")
    return value  # type: ignore[return-value]


def reduce_tensor(sums: Tensor) -> Tensor:
    """Add up a tensor over all ranks."""
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


# --- The data ---------------------------------------------------------------------------------


def load_data(arguments: argparse.Namespace, ranks: Ranks, saved: dict[str, Any] | None) -> Job:
    """Read the matches and make a network, with a checkpoint's vocabulary if there is one."""
    given = vars(arguments)
    where = {n: given[n] for n in ("data_dir", "cache_dir", "synthetic", "synthetic_matches")}
    own = {n: given[n] for n in ("width", "dropout", "balls_per_match")}
    kept = saved["options"] if saved else own
    if changed := [n for n in own if arguments.resume and kept[n] != own[n]]:
        flag = changed[0].replace("_", "-")
        raise ValueError(f"--{flag} was {kept[changed[0]]} when this run started; give it again.")
    options = cricket.complete(cricket.CricketOptions(**{**kept, **where}))
    splits = cricket.data(options)
    names = ("test",) if arguments.test_only else ("train", "validation", "test")
    parts: dict[str, Any] = {name: getattr(splits, name) for name in names}
    if empty := [name for name, part in parts.items() if not len(part)]:
        raise ValueError(f"No balls are left for {empty[0]}; name more matches with --data-dir.")
    step = arguments.batch_size * ranks.world_size
    if not arguments.test_only and step > len(parts["train"]):
        raise ValueError(f"--batch-size × ranks is {step}; the most is {len(parts['train'])}.")
    torch.manual_seed(arguments.seed)  # the same initial weights on every rank
    return Job(arguments, ranks, options, parts, cricket.model(options).to(ranks.device))


def loader(job: Job, part: Dataset[Any], batch_size: int, **more: Any) -> DataLoader[Any]:
    """Return batches of graphs."""
    more["num_workers"] = job.arguments.num_workers
    return DataLoader(part, batch_size, collate_fn=collate, **more)


# --- Checkpoints ------------------------------------------------------------------------------


def find_checkpoint(arguments: argparse.Namespace) -> Path | None:
    """Return the checkpoint to start from, or None; make the output folder. For rank 0."""
    folder: Path = arguments.output_dir
    if arguments.test_only:
        return folder / "best_model.pt"
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "last.pt"
    if last.exists() and not arguments.resume:
        raise ValueError(f"{folder} holds a run; add --resume, or name another --output-dir.")
    return last if last.exists() else None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint on the CPU, so that it loads on any device."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.PickleError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be loaded: {reason}. Check --output-dir.") from error
    return saved


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint under another name, then rename it: its own name is always whole."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def save_epoch(job: Job, optimizer: AdamW, history: list[dict[str, float]]) -> None:
    """Write best_model.pt if this epoch is the best, and last.pt for --resume. For rank 0."""
    best, folder = min(history, key=lambda epoch: epoch["mae"]), job.arguments.output_dir
    state = {"network": job.network.state_dict(), "options": asdict(job.options), "best": best}
    if best is history[-1]:
        save(folder / "best_model.pt", state)
    save(folder / "last.pt", {**state, "optimizer": optimizer.state_dict(), "history": history})
    (folder / "history.json").write_text(json.dumps(history, indent=1))


# --- Training ---------------------------------------------------------------------------------


def train_epoch(job: Job, wrapped: nn.Module, optimizer: AdamW, batches: Batches) -> float:
    """Train on this rank's batches, each with its learning rate; return the loss over all ranks."""
    wrapped.train()
    sums = torch.zeros(2, device=job.ranks.device)
    for stored, rate in batches:
        graphs = stored.to(job.ranks.device)
        loss = cricket.loss(wrapped(graphs), graphs)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # DDP averages gradients while this runs
        nn.utils.clip_grad_norm_(wrapped.parameters(), 5.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        # The sums stay on the device: to read one in each step would make the GPU wait.
        sums += torch.stack([loss.detach(), torch.ones_like(loss)]) * graphs.num_graphs
    total, balls = reduce_tensor(sums).tolist()
    return float(total / balls)


@torch.no_grad()
def evaluate(job: Job, name: str) -> dict[str, float]:
    """Return and print the errors in runs over a part of the data. Every ball counts once.

    A DistributedSampler would repeat balls to make the shares equal, so each rank takes every n-th
    ball instead. Shares may then be unequal, so this calls the network without DDP's wrapper: a
    wrapped one may wait in its forward pass for ranks that have no batch left.
    """
    job.network.eval()
    part: Any = job.parts[name]
    share = Subset(part, range(job.ranks.rank, len(part), job.ranks.world_size))
    exact = torch.float32 if job.ranks.device.type == "mps" else torch.float64
    sums = torch.zeros(5, dtype=exact, device=job.ranks.device)
    for stored in loader(job, share, 512):
        graphs = stored.to(job.ranks.device)
        actual = graphs["query"].y.to(exact)
        error = job.network(graphs).to(exact) - actual
        columns = (torch.ones_like(error), error.abs(), error**2, actual, actual**2)
        sums += torch.stack(columns).sum(dim=1)
    # Add up, then divide once: a mean of the ranks' means is wrong if shares are unequal.
    balls, absolute, squared, runs, squared_runs = reduce_tensor(sums).tolist()
    spread = squared_runs - runs * runs / balls
    r2 = 1 - squared / spread if spread > 0 else math.nan
    mae, rmse = absolute / balls, math.sqrt(squared / balls)
    say(f"{name} MAE {mae:.4f}  RMSE {rmse:.4f}  R² {r2:.4f}  ({balls:,.0f} balls)")
    return {"balls": balls, "mae": mae, "rmse": rmse, "r2": r2}


def scaled_rate(arguments: argparse.Namespace, effective: int) -> float:
    """Return the learning rate for an effective batch: --lr is that of --base-batch-size."""
    ratio = effective / arguments.base_batch_size
    factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    return float(arguments.lr * factors[arguments.lr_scaling])


def train(job: Job, last: dict[str, Any] | None) -> None:
    """Train for the epochs that are left after the last checkpoint."""
    arguments, (rank, local_rank, world_size, device) = job.arguments, job.ranks
    optimizer = AdamW(job.network.parameters(), weight_decay=1e-4)
    history: list[dict[str, float]] = last["history"] if last else []
    if last:
        job.network.load_state_dict(last["network"])
        optimizer.load_state_dict(last["optimizer"])
        say(f"resumed after epoch {len(history)}")
    run = on_every_rank(lambda: start_wandb(job) if rank == 0 else None)
    wrapped = job.network
    if world_size > 1:
        gpu = [local_rank] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(wrapped, device_ids=gpu)
    # Each rank gets its own share of the data, in a new order each epoch. What does not fill a step
    # is left out: only with equal batches is the mean of the ranks' gradients that of all balls.
    sampler: DistributedSampler[Any] = DistributedSampler(
        job.parts["train"], world_size, rank, seed=arguments.seed, drop_last=True
    )
    size = arguments.batch_size
    batches = loader(job, job.parts["train"], size, sampler=sampler, drop_last=True)
    effective, steps = size * world_size, len(batches)  # balls per step; steps per epoch
    peak, warmup = scaled_rate(arguments, effective), max(arguments.warmup_steps, 1)
    say(f"batch {size} × ranks {world_size} = {effective} balls per step, rate {peak:.2g}")
    for epoch in range(len(history), arguments.epochs):
        sampler.set_epoch(epoch)  # without this, every epoch has the order of the first
        # Dropout differs by rank and epoch, and is the same after resuming.
        torch.manual_seed(arguments.seed + 1 + epoch * world_size + rank)
        begun, first = time.perf_counter(), epoch * steps + 1
        rates = [peak * min(1, step / warmup) for step in range(first, first + steps)]
        loss = train_epoch(job, wrapped, optimizer, zip(batches, rates, strict=True))
        speed = steps * effective / (time.perf_counter() - begun)
        say(f"epoch {epoch + 1}  loss {loss:.4f}  {speed:,.0f} balls/s")
        found = evaluate(job, "validation")
        if rank == 0:
            history.append({"epoch": epoch + 1, "loss": loss, "lr": rates[-1], **found})
            save_epoch(job, optimizer, history)
        if run:
            scores = {f"val/{score}": value for score, value in found.items()}
            run.log({"epoch": epoch + 1, "train/loss": loss, "train/lr": rates[-1], **scores})
        barrier()  # every rank reads best_model.pt for the test: wait until rank 0 has written it
    if run:
        run.finish()


def start_wandb(job: Job) -> Any:
    """Return a W&B run, or None if --wandb-mode is disabled. For rank 0."""
    mode, folder = job.arguments.wandb_mode, job.arguments.output_dir
    if mode == "disabled":
        return None
    try:
        import wandb  # noqa: PLC0415 - only rank 0 needs it

        return wandb.init(
            project=job.arguments.wandb_project,
            name=folder.name,
            config={**vars(job.arguments), "world_size": job.ranks.world_size},
            dir=folder,
            mode=mode,
            settings=wandb.Settings(init_timeout=120),
        )
    except Exception as error:  # not installed, no key, no network
        raise ValueError(f"--wandb-mode {mode}: {error}") from error


# --- The command line -------------------------------------------------------------------------


def say(line: str) -> None:
    """Print a line on rank 0 only, and at once: people read a job's output while it runs."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line. Every rank finds the same mistake in it; one of them reports it."""
    parser = argparse.ArgumentParser(description="Train a graph network on cricket with DDP.")
    parser.error = refuse  # type: ignore[method-assign]
    add, folder = parser.add_argument, Path("runs/cricket_ddp")
    add("--data-dir", default="data/cricket", help="Cricsheet's JSON: a folder, a zip or a tar")
    add("--cache-dir", help="where read matches are kept")
    add("--synthetic", action="store_true", help="make matches up instead")
    add("--synthetic-matches", type=int, default=30)
    add("--balls-per-match", type=int, help="train on this many balls of each match; else on all")
    add("--width", type=int, default=64, help="channels of the network")
    add("--dropout", type=float, default=0.1)
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=64, help="balls per rank and step")
    add("--lr", type=float, default=1e-3, help="learning rate for --base-batch-size")
    add("--base-batch-size", type=int, default=64, help="balls per step, on all ranks, for --lr")
    add("--lr-scaling", choices=("none", "linear", "sqrt"), default="none", help="with the batch")
    add("--warmup-steps", type=int, default=0, help="steps of a linear ramp to the full rate")
    add("--num-workers", type=int, default=0, help="loader processes per rank")
    add("--seed", type=int, default=42, help="of weights, order and dropout")
    add("--output-dir", type=Path, default=folder, help="on a disk that all ranks see")
    add("--resume", action="store_true", help="continue after the last epoch in --output-dir")
    add("--test-only", action="store_true", help="test best_model.pt of --output-dir")
    add("--timeout-s", type=float, default=600.0, help="how long ranks wait for the slowest")
    add("--wandb-mode", choices=("disabled", "offline", "online"), default="disabled")
    add("--wandb-project", default="cricket-ddp")
    given = parser.parse_args()
    counts = dict.fromkeys(("epochs", "batch_size", "base_batch_size", "synthetic_matches"), 1)
    least = {"lr": 1e-12, "timeout_s": 1, "num_workers": 0, "warmup_steps": 0}
    for name, value in {**counts, **least}.items():
        if not value <= getattr(given, name) < math.inf:
            refuse(f"--{name.replace('_', '-')} is {getattr(given, name)}; the least is {value}.")
    return given


def main() -> None:
    """Join the other ranks, train, test the best network on all ranks, leave."""
    arguments = parse_arguments()
    ranks = setup_distributed(arguments.timeout_s)
    box = [on_every_rank(lambda: find_checkpoint(arguments) if ranks.rank == 0 else None)]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)  # rank 0 has looked, so that all agree
    saved = on_every_rank(lambda: load_checkpoint(box[0]) if box[0] else None)
    job = on_every_rank(lambda: load_data(arguments, ranks, saved))
    say(f"ranks: {ranks.world_size}, device: {ranks.device.type}")
    if not arguments.test_only:
        train(job, saved)
        saved = on_every_rank(lambda: load_checkpoint(arguments.output_dir / "best_model.pt"))
    assert saved is not None
    job.network.load_state_dict(saved["network"])
    evaluate(job, "test")
    leave()


if __name__ == "__main__":
    main()
