"""Small trainings with checkpoints, each resumed in the way in which its framework's pages do it.

    python benchmarks/resume_frameworks.py NAME [--every STEPS] [--workers N] [--resume]

Three epochs of twelve steps, on any number of ranks; a checkpoint each STEPS steps: 12 at an
epoch's end, 5 within it. `--per-rank N` gives each rank N samples per step.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

OUT = Path("out")
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
NAMES = (
    *("lightning", "trainer", "accelerate", "ddp", "fsdp2"),
    *("datasets_stream", "stateful_loader", "webdataset"),
)
SAMPLES, BATCH, EPOCHS = 96, 8, 3


def main() -> None:
    """Train as one of the functions here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--per-rank", type=int, default=BATCH // WORLD, help="samples per rank")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    globals()[args.name](args)


def rows() -> TensorDataset:
    """Return 96 samples of 8 numbers, and their classes."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def net(dropout: float = 0.1) -> nn.Module:
    """Return a model with dropout, which draws random numbers."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))


def lightning(args: argparse.Namespace) -> None:
    """Lightning's Trainer with `ckpt_path`."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, _: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    pl.seed_everything(0, workers=True, verbose=False)
    saves = pl.callbacks.ModelCheckpoint(
        OUT, every_n_train_steps=args.every, save_top_k=-1, save_last=True
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_epochs=EPOCHS,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(rows(), args.per_rank, shuffle=True, num_workers=args.workers)
    trainer.fit(Module(), loader, ckpt_path=OUT / "last.ckpt" if args.resume else None)


def trainer(args: argparse.Namespace) -> None:
    """Hugging Face's Trainer with `resume_from_checkpoint`."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Any, labels: Any) -> Any:
            out = self.net(x)
            return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}

    given = TrainingArguments(
        output_dir=str(OUT),
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=args.per_rank,
        save_steps=args.every,
        dataloader_num_workers=args.workers,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = [{"x": x, "labels": y} for x, y in rows()]
    Trainer(Model(), given, train_dataset=data).train(resume_from_checkpoint=args.resume)


def accelerate(args: argparse.Namespace) -> None:
    """Accelerate's save_state, load_state and skip_first_batches."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(rows(), args.per_rank, shuffle=True, num_workers=args.workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    if args.resume:
        last = max(OUT.glob("step_*"), key=lambda path: int(path.name[5:]))
        accelerator.load_state(str(last))
        step = int(last.name[5:])
    for epoch in range(step // len(loader), EPOCHS):
        loader.set_epoch(epoch)
        skip = step - epoch * len(loader)
        for x, y in accelerator.skip_first_batches(loader, skip) if skip else loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % args.every == 0:
                accelerator.save_state(str(OUT / f"step_{step}"))


def plain(args: argparse.Namespace, loader: Any, sampler: Any = None, state: Any = None) -> None:
    """Train in a loop by hand; a loader or a stream may have a state of its own."""
    model = net()
    if WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first, step = 0, 0
    if args.resume:
        kept = torch.load(OUT / f"last-{RANK}.pt", weights_only=False)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        first, step = kept["epoch"], kept["step"]
        if state is not None:
            state.load_state_dict(kept["state"])
    for epoch in range(first, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            step += 1
            if step % args.every == 0:
                made = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                made |= {"random": torch.get_rng_state(), "epoch": step // 12, "step": step}
                made |= {"state": None if state is None else state.state_dict()}
                torch.save(made, OUT / f"new-{RANK}.pt")
                (OUT / f"new-{RANK}.pt").replace(OUT / f"last-{RANK}.pt")


def joined() -> None:
    """Join the ranks."""
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")


def ddp(args: argparse.Namespace) -> None:
    """Plain DDP with DistributedSampler and set_epoch, which resumes at an epoch's end."""
    joined()
    sampler = DistributedSampler(rows(), WORLD, RANK)
    loader = DataLoader(rows(), args.per_rank, sampler=sampler, num_workers=args.workers)
    plain(args, loader, sampler)


def stateful_loader(args: argparse.Namespace) -> None:
    """torchdata's StatefulDataLoader, which saves its place."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    joined()
    loader = StatefulDataLoader(rows(), args.per_rank, shuffle=True, num_workers=args.workers)
    plain(args, loader, state=loader)


def datasets_stream(args: argparse.Namespace) -> None:
    """A stream of Hugging Face datasets with a shuffle buffer, which saves its place."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    joined()
    x, y = rows().tensors
    stream = Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).to_iterable_dataset(num_shards=4)
    stream = split_dataset_by_node(stream, RANK, WORLD).shuffle(seed=0, buffer_size=16)

    def together(some: list[Any]) -> Any:
        return torch.tensor([one["x"] for one in some]), torch.tensor([one["y"] for one in some])

    loader = DataLoader(stream, args.per_rank, collate_fn=together, num_workers=args.workers)
    plain(args, loader, stream, state=stream)


def webdataset(args: argparse.Namespace) -> None:
    """WebDataset's shards with a shuffle buffer, which have no state to save."""
    import webdataset as wds

    joined()
    pattern = str(OUT / "rows-{000000..000003}.tar")
    if RANK == 0 and not (OUT / "rows-000000.tar").exists():
        with wds.ShardWriter(str(OUT / "rows-%06d.tar"), maxcount=24, verbose=0) as shards:
            for number, (x, y) in enumerate(rows()):
                shards.write({"__key__": f"{number:03}", "x.pth": x, "y.cls": int(y)})
    if WORLD > 1:
        torch.distributed.barrier()
    data = wds.WebDataset(pattern, shardshuffle=4, seed=0, nodesplitter=wds.split_by_node)
    data = data.shuffle(16).decode().to_tuple("x.pth", "y.cls")
    plain(args, DataLoader(data, args.per_rank, num_workers=args.workers))


def fsdp2(args: argparse.Namespace) -> None:
    """FSDP2 with torch.distributed.checkpoint, which resumes at an epoch's end."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo",
        **({} if WORLD > 1 else {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}),
    )
    model = net(dropout=0.0)  # random numbers are in no checkpoint here
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = DistributedSampler(rows(), WORLD, RANK)
    loader = DataLoader(rows(), args.per_rank, sampler=sampler, num_workers=args.workers)
    step = 0

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    if args.resume:
        last = max(OUT.glob("step_*"), key=lambda path: int(path.name[5:]))
        kept = state()
        dcp.load(kept, checkpoint_id=last)
        set_state_dict(
            model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"]
        )
        step = kept["step"]
    for epoch in range(step // 12, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if step % args.every == 0:
                dcp.save(state(), checkpoint_id=OUT / f"step_{step}")


if __name__ == "__main__":
    main()
