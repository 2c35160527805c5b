"""Scripts with a mistake that nobody sees, each with its right twin, and other right scripts.

    python benchmarks/check_plants.py FOLDER [NAME ...]

A script is a base and some edits. A plant's twin is its base without the wrong edit. `CODES` of
a plant are those that name its mistake; a plant without any has no rule yet. The bases are written
as people write them, and differ in shape: functions, classes, one flat file, Lightning, Accelerate.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

Edits = tuple[tuple[str, str], ...]
"""What replaces what; the old text is in the script once."""

VISION = """\
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shapes(Dataset):
    # Small images of two kinds; those to train on are flipped and shifted.
    def __init__(self, size, seed, augment):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(size, 1, 12, 12, generator=generator)
        half = self.images[:, 0, :6].mean((1, 2)) > self.images[:, 0, 6:].mean((1, 2))
        self.labels = half.long()
        self.augment = augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1).roll(int(torch.randint(-1, 2, ())), -1)
        return image, self.labels[index]


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 25, 2),
    )


def train_epoch(model, loader, criterion, optimizer):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = torch.zeros(2)
    for images, labels in loader:
        predictions = model(images).argmax(1)
        correct += torch.tensor([float((predictions == labels).sum()), float(len(labels))])
    dist.all_reduce(correct)
    return (correct[0] / correct[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    train_set = Shapes(512, 1, augment=True)
    val_set = Shapes(200, 2, augment=False)
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    val_loader = DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))
    model = DDP(build_model())
    torch.manual_seed(42 + rank)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    epochs = 4
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    best = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, criterion, optimizer)
        accuracy = evaluate(model, val_loader)
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
"""Images on every rank, as in most of the tutorials."""

TRAINER = """\
import argparse
import contextlib
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_reduce, barrier, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, train_data, test_data, args):
        self.rank = int(os.environ["RANK"])
        self.args = args
        self.sampler = DistributedSampler(train_data, seed=args.seed)
        self.train_data = DataLoader(train_data, args.batch_size, sampler=self.sampler)
        test_sampler = DistributedSampler(test_data, shuffle=False)
        self.test_data = DataLoader(test_data, args.batch_size, sampler=test_sampler)
        self.model = DDP(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.best_loss = float("inf")

    def train(self):
        for epoch in range(self.args.epochs):
            self.run_epoch(epoch)
            loss = self.test()
            if self.rank == 0:
                print(f"epoch {epoch} | test loss {loss:.4f}")
            if loss < self.best_loss:
                self.best_loss = loss
                self.save_snapshot(epoch)

    def run_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        accumulate = self.args.accumulate
        for number, (source, targets) in enumerate(self.train_data):
            last = (number + 1) % accumulate == 0
            with contextlib.nullcontext() if last else self.model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(self.model(source), targets) / accumulate
                self.scaler.scale(loss).backward()
            if last:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=True)

    def test(self):
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for source, targets in self.test_data:
                loss = F.cross_entropy(self.model(source), targets, reduction="sum")
                total += torch.tensor([loss.item(), len(targets)], dtype=torch.float64)
        all_reduce(total)
        return (total[0] / total[1]).item()

    def save_snapshot(self, epoch):
        if self.rank == 0:
            snapshot = {"model": self.model.module.state_dict(), "epoch": epoch}
            torch.save(snapshot, self.args.snapshot)


def load_data(size, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 20, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--snapshot", default="snapshot.pt")
    args = parser.parse_args()
    init_process_group(backend="gloo")
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                          nn.Linear(64, 5))
    trainer = Trainer(model, load_data(640, 0), load_data(160, 1), args)
    trainer.train()
    barrier()
    destroy_process_group()


if __name__ == "__main__":
    main()
"""
"""A class that trains: mixed precision, accumulation, a snapshot."""

GPT = """\
import contextlib
import math
import os

import numpy as np
import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, block_size, vocab_size = 8, 16, 32
n_embd, n_head, n_layer, dropout = 32, 4, 2, 0.1
max_iters, eval_interval, eval_iters, warmup_iters = 40, 10, 4, 5
learning_rate, min_lr, grad_clip = 1e-3, 1e-4, 1.0
gradient_accumulation_steps = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(),
                                 nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout))
        self.dropout = dropout

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, vocab_size).float(), targets.view(-1))


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank, ddp_world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset = True, 0

torch.manual_seed(1337 + seed_offset)
rng = np.random.default_rng(7)
tokens = np.cumsum(rng.integers(0, 3, 20000)) % vocab_size
data = {"train": tokens[:18000], "val": tokens[18000:]}
ctx = torch.autocast("cpu", dtype=torch.bfloat16)


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size - 1, (batch_size,))
    x = torch.stack([torch.from_numpy(data[split][i : i + block_size]) for i in ix])
    y = torch.stack([torch.from_numpy(data[split][i + 1 : i + 1 + block_size]) for i in ix])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    out = {}
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            with ctx:
                losses[k] = raw_model(X, Y)[1].item()
        out[split] = losses.mean()
    raw_model.train()
    return out


best_val_loss = 1e9
X, Y = get_batch("train")
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            torch.save({"model": raw_model.state_dict(), "iter_num": iter_num}, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
"""
"""One flat file, in the shape of nanoGPT."""

FINETUNE = """\
import copy

import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, random_split


class Classifier(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU()
        )
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.fc(self.backbone(x))


def load_pretrained():
    torch.manual_seed(5)
    return Classifier(100)


def train_model(model, loaders, criterion, optimizer, scheduler, num_epochs):
    best_weights, best_accuracy = copy.deepcopy(model.state_dict()), 0.0
    for epoch in range(num_epochs):
        model.train()
        running_loss = 0.0
        for inputs, labels in loaders["train"]:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * inputs.size(0)
        scheduler.step()
        epoch_loss = running_loss / len(loaders["train"].dataset)

        model.eval()
        corrects = 0
        with torch.no_grad():
            for inputs, labels in loaders["val"]:
                outputs = model(inputs)
                corrects += (outputs.argmax(1) == labels).sum().item()
        accuracy = corrects / len(loaders["val"].dataset)
        print(f"Epoch {epoch + 1}/{num_epochs} loss {epoch_loss:.4f} accuracy {accuracy:.4f}")
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return model


torch.manual_seed(0)
features = torch.randn(600, 24)
dataset = TensorDataset(features, features[:, :4].argmax(1))
train_set, val_set = random_split(dataset, [480, 120])
loaders = {
    "train": DataLoader(train_set, batch_size=16, shuffle=True),
    "val": DataLoader(val_set, batch_size=32),
}
model = load_pretrained()
model.fc = nn.Linear(model.fc.in_features, 4)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
model = train_model(model, loaders, criterion, optimizer, scheduler, num_epochs=6)
torch.save(model.state_dict(), "finetuned.pt")
"""
"""One process: a new head on an old body, the best weights kept."""

TEXT = """\
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD, VOCAB, MAX_LEN = 0, 40, 24


class Sentences(Dataset):
    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.rows = []
        for _ in range(count):
            start, length = draw.randrange(1, VOCAB), draw.randrange(4, MAX_LEN + 1)
            self.rows.append([1 + (start + 3 * i) % (VOCAB - 1) for i in range(length)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return torch.tensor(self.rows[index])


def collate(rows):
    batch = pad_sequence(rows, batch_first=True, padding_value=PAD)
    return batch[:, :-1], batch[:, 1:]


class Tagger(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        return self.out(self.drop(self.rnn(self.embed(tokens))[0]))


def perplexity(model, loader, loss_fn):
    model.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in loader:
            loss = loss_fn(model(inputs).transpose(1, 2), targets)
            sums += torch.tensor([loss.item(), (targets != PAD).sum().item()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).exp().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    train_set, valid_set = Sentences(480, 1), Sentences(120, 2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 8, sampler=sampler, collate_fn=collate, drop_last=True)
    valid_sampler = DistributedSampler(valid_set, shuffle=False)
    valid_loader = DataLoader(valid_set, 8, sampler=valid_sampler, collate_fn=collate)
    model = nn.parallel.DistributedDataParallel(Tagger())
    torch.manual_seed(3 + rank)
    loss_fn = nn.CrossEntropyLoss(ignore_index=PAD, reduction="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    epochs, warmup = 3, 6
    total_steps = epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, max(0.0, (total_steps - s) / total_steps))
    )
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in train_loader:
            count = (targets != PAD).sum()
            dist.all_reduce(count)
            loss = loss_fn(model(inputs).transpose(1, 2), targets) * world / count
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        score = perplexity(model, valid_loader, loss_fn)
        if rank == 0:
            print(f"epoch {epoch}: perplexity {score:.2f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
"""Sentences of unequal length: padding, and a mean over all tokens of the step."""

STREAM = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    # Twelve shards of 40 rows; shard n is made from seed n.
    def __init__(self, shards, rank, world_size):
        self.shards, self.rank, self.world_size = shards, rank, world_size
        self.epoch = 0

    def __iter__(self):
        order = torch.randperm(self.shards, generator=torch.Generator().manual_seed(self.epoch))
        mine = order.tolist()[self.rank :: self.world_size]
        worker = get_worker_info()
        if worker is not None:
            mine = mine[worker.id :: worker.num_workers]
        for shard in mine:
            generator = torch.Generator().manual_seed(1000 + shard)
            rows = torch.randn(40, 12, generator=generator)
            for row in rows:
                yield row, row[:3].sum()


def train(rank, world_size):
    torch.manual_seed(0)
    dataset = Shards(12, rank, world_size)
    loader = DataLoader(dataset, batch_size=8, num_workers=2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        dataset.epoch = epoch
        total, count = 0.0, 0
        for rows, targets in loader:
            loss = nn.functional.mse_loss(model(rows).squeeze(1), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
            count += len(rows)
        sums = torch.tensor([total, count])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} loss {sums[0] / sums[1]:.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.barrier()
    dist.destroy_process_group()
"""
"""A stream of shards, split over ranks and over loader workers."""

MANUAL = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 50)
        self.fc2 = nn.Linear(50, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def partition(dataset, rank, size, seed):
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return Subset(dataset, order.tolist()[rank::size])


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad /= size


def run(rank, size):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(512, 16, generator=generator)
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    torch.manual_seed(1234)
    model = Net()
    for param in model.parameters():
        dist.broadcast(param.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(3):
        train_set = DataLoader(partition(dataset, rank, size, epoch), batch_size=16)
        epoch_loss = torch.zeros(())
        for data, target in train_set:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            epoch_loss += loss.detach()
            loss.backward()
            average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        dist.all_reduce(epoch_loss)
        if rank == 0:
            print("epoch", epoch, "loss", epoch_loss.item() / size / len(train_set))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
"""
"""Gradients averaged by hand, without DDP."""

DISTILL = """\
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mlp(width, drop):
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Dropout(drop), nn.Linear(width, 6))


@torch.no_grad()
def update_average(average, model, decay=0.95):
    for kept, new in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, 1 - decay)


@torch.no_grad()
def accuracy(model, loader):
    was_training = model.training
    model.eval()
    right = torch.zeros(2)
    for inputs, labels in loader:
        right += torch.tensor([(model(inputs).argmax(1) == labels).sum(), len(labels)])
    model.train(was_training)
    dist.all_reduce(right)
    return float(right[0] / right[1])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(800, 20, generator=generator)
    y = x[:, :6].argmax(1)
    train_set, test_set = TensorDataset(x[:640], y[:640]), TensorDataset(x[640:], y[640:])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    test_loader = DataLoader(
        test_set, batch_size=40, sampler=DistributedSampler(test_set, shuffle=False)
    )
    torch.manual_seed(9)
    teacher = mlp(96, 0.5).requires_grad_(False)
    teacher.eval()
    student = mlp(24, 0.0)
    average = copy.deepcopy(student).requires_grad_(False)
    model = DDP(student)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in train_loader:
            with torch.no_grad():
                guide = F.softmax(teacher(inputs) / 2.0, dim=1)
            logits = model(inputs)
            hard = F.cross_entropy(logits, labels)
            soft = F.kl_div(F.log_softmax(logits / 2.0, dim=1), guide, reduction="batchmean")
            loss = 0.7 * hard + 0.3 * 4.0 * soft
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_average(average, student)
        score = accuracy(average, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy of the averaged weights {score:.3f}")
    if rank == 0:
        torch.save({"student": student.state_dict(), "average": average.state_dict()}, "out.pt")
    dist.barrier()
    dist.destroy_process_group()


main()
"""
"""A teacher, a student, and a moving average of the student that is evaluated."""

LIGHTNING = """\
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))
        self.register_buffer("sums", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.net(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        errors = (self(x) - y).square()
        self.sums += torch.stack([errors.sum(), errors.new_tensor(len(errors))])

    def on_validation_epoch_end(self):
        sums = self.all_gather(self.sums).reshape(-1, 2).sum(0)
        self.log("val_loss", sums[0] / sums[1], rank_zero_only=False, sync_dist=False)
        self.sums.zero_()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return [optimizer], [scheduler]


def main():
    L.seed_everything(4)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    x = torch.randn(419, 8)
    data = TensorDataset(x, x[:, :2].sum(1))
    train_set, val_set = Subset(data, range(400)), Subset(data, range(400, 419))
    sampler = DistributedSampler(train_set, world, rank)
    share = Subset(val_set, range(rank, len(val_set), world))
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto",
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )
    trainer.fit(Regressor(), DataLoader(train_set, 16, sampler=sampler), DataLoader(share, 4))


if __name__ == "__main__":
    main()
"""
"""A LightningModule that sums up its own validation."""

ACCELERATE = """\
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

config = {"lr": 2e-3, "num_epochs": 3, "seed": 42, "batch_size": 16}


def get_dataloaders(batch_size):
    x = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
    y = x[:, :5].argmax(1)
    train, test = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def training_function(config):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(config["seed"])
    train_loader, eval_loader = get_dataloaders(config["batch_size"])
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config["lr"], epochs=config["num_epochs"],
        steps_per_epoch=len(train_loader),
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(config["num_epochs"]):
        model.train()
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct, total = 0, 0
        for inputs, targets in eval_loader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            correct += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {100 * correct / total:.2f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    training_function(config)
"""
"""Accelerate's own example, in small."""

FSDP = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class MLPBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    blocks = [MLPBlock(32) for _ in range(3)]
    model = nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(480, 16, generator=generator)
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(dataset, seed=2)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        shown = torch.zeros(2)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
            shown += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown[0] / shown[1]:.4f}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(state, "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
"""FSDP2 over blocks."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A mistake in a script."""

    base: str
    wrong: Edits
    codes: tuple[str, ...] = ()
    """Any of these names the mistake; none: no rule is about it."""
    what: str
    twin: Edits = ()
    """Edits of the base that the twin has, too."""

    @property
    def right(self) -> str:
        """The twin without the mistake."""
        return edited(self.base, self.twin)

    @property
    def text(self) -> str:
        """The script with the mistake."""
        return edited(self.right, self.wrong)


def edited(text: str, edits: Edits) -> str:
    """Return a script with some of its text replaced."""
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in the script"
        text = text.replace(old, new)
    return text


_STEP = "        loss.backward()\n        optimizer.step()\n"

PLANTS: dict[str, Plant] = {
    # What the samples are.
    "no_set_epoch": Plant(
        base=VISION,
        wrong=(("        sampler.set_epoch(epoch)\n", ""),),
        codes=("SS103",),
        what="the sampler is never told its epoch",
    ),
    "no_sampler": Plant(
        base=VISION,
        wrong=(("batch_size=16, sampler=sampler)", "batch_size=16, shuffle=True)"),),
        codes=("SS101", "SS102"),
        what="the training loader shuffles by itself on each rank, with one seed",
    ),
    "stream_not_split": Plant(
        base=STREAM,
        wrong=(("mine = order.tolist()[self.rank :: self.world_size]", "mine = order.tolist()"),),
        codes=("SS105", "SS101"),
        what="each rank reads all shards of a stream",
    ),
    "collate_drops_rows": Plant(
        base=TEXT,
        wrong=(
            (
                "def collate(rows):\n",
                "def collate(rows):\n    rows = [r for r in rows if len(r) < 20]\n",
            ),
        ),
        what="the collate function leaves long rows out, in validation, too",
    ),
    "drop_last_eval": Plant(
        base=VISION,
        wrong=(
            (
                "DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))",
                "DataLoader(\n        val_set, 32, drop_last=True, "
                "sampler=DistributedSampler(val_set, shuffle=False)\n    )",
            ),
        ),
        what="validation leaves the last batch out",
    ),
    "augmented_validation": Plant(
        base=VISION,
        wrong=(("Shapes(200, 2, augment=False)", "Shapes(200, 2, augment=True)"),),
        what="validation images are flipped and shifted at random",
    ),
    # The model, and who has which weights.
    "unsynced_seeds": Plant(
        base=MANUAL,
        wrong=(
            ("torch.manual_seed(1234)", "torch.manual_seed(1234 + rank)"),
            (
                "    for param in model.parameters():\n        dist.broadcast(param.data, src=0)\n",
                "",
            ),
        ),
        codes=("SS202",),
        what="the ranks begin with weights of their own",
    ),
    "restored_on_one_rank": Plant(
        base=VISION,
        twin=(
            (
                "    dist.barrier()\n",
                "    dist.barrier()\n"
                '    model.module.load_state_dict(torch.load("best.pt", weights_only=True))\n'
                "    for group in optimizer.param_groups:\n"
                '        group["lr"] = 0.01\n'
                "    for epoch in range(epochs, epochs + 2):\n"
                "        sampler.set_epoch(epoch)\n"
                "        train_epoch(model, train_loader, criterion, optimizer)\n"
                "    accuracy = evaluate(model, val_loader)\n"
                "    if rank == 0:\n"
                '        print(f"after the last epochs: {accuracy:.4f}")\n',
            ),
        ),
        wrong=(
            (
                '    model.module.load_state_dict(torch.load("best.pt", weights_only=True))\n',
                "    if rank == 0:\n"
                '        model.module.load_state_dict(torch.load("best.pt", weights_only=True))\n',
            ),
        ),
        codes=("SS203", "SS202"),
        what="the best weights are loaded on rank 0 only, and trained on",
    ),
    "moved_after_wrapping": Plant(
        base=TRAINER,
        twin=(
            (
                "        self.model.eval()\n",
                "        self.model.eval()\n        exact = copy.deepcopy(self.model.module).double()\n",
            ),
            (
                "F.cross_entropy(self.model(source), targets, reduc",
                "F.cross_entropy(exact(source.double()), targets, reduc",
            ),
            (
                "import argparse\nimport contextlib\n",
                "import argparse\nimport contextlib\nimport copy\n",
            ),
        ),
        wrong=(
            ("exact = copy.deepcopy(self.model.module).double()", "exact = self.model.double()"),
            (
                "        all_reduce(total)\n",
                "        self.model.float()\n        all_reduce(total)\n",
            ),
        ),
        codes=("SS203", "SS201", "SS309"),
        what="the wrapped model is made double and float again: DDP's hooks are gone (pytorch #104336)",
    ),
    "never_synchronised": Plant(
        base=GPT,
        wrong=(
            (
                "micro_step == gradient_accumulation_steps - 1",
                "micro_step == gradient_accumulation_steps",
            ),
        ),
        codes=("SS203", "SS201", "SS309"),
        what="no micro-step is taken for the last: gradients are never averaged",
    ),
    "average_on_rank_0": Plant(
        base=DISTILL,
        wrong=(
            (
                "            update_average(average, student)\n",
                "            if rank == 0:\n                update_average(average, student)\n",
            ),
        ),
        codes=("SS203", "SS206"),
        what="the moving average is kept on rank 0, and all ranks evaluate with theirs",
    ),
    "frozen_by_attribute": Plant(
        base=FINETUNE,
        twin=(
            (
                "optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)",
                "model.backbone.requires_grad_(False)\n"
                "optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)",
            ),
        ),
        wrong=(("model.backbone.requires_grad_(False)", "model.backbone.requires_grad = False"),),
        what="a body that is meant to be frozen trains",
    ),
    "head_after_optimizer": Plant(
        base=FINETUNE,
        wrong=(
            (
                "model.fc = nn.Linear(model.fc.in_features, 4)\ncriterion = nn.CrossEntropyLoss()\n"
                "optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)\n",
                "criterion = nn.CrossEntropyLoss()\n"
                "optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)\n"
                "model.fc = nn.Linear(model.fc.in_features, 4)\n",
            ),
        ),
        codes=("SS701", "SS702"),
        what="the new head is made after the optimizer",
    ),
    # The step.
    "clip_before_unscale": Plant(
        base=TRAINER,
        wrong=(("                self.scaler.unscale_(self.optimizer)\n", ""),),
        codes=("SS302",),
        what="scaled gradients are clipped",
    ),
    "scaled_step": Plant(
        base=TRAINER,
        twin=(
            (
                "                self.scaler.unscale_(self.optimizer)\n"
                "                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n",
                "",
            ),
        ),
        wrong=(("self.scaler.step(self.optimizer)", "self.optimizer.step()"),),
        codes=("SS310",),
        what="optimizer.step() in place of scaler.step()",
    ),
    "not_divided_by_micro_batches": Plant(
        base=TRAINER,
        wrong=(("targets) / accumulate\n", "targets)\n"),),
        codes=("SS309",),
        what="the loss is not divided by the number of micro-batches",
    ),
    "no_zero_grad": Plant(
        base=FINETUNE,
        wrong=(("            optimizer.zero_grad()\n", ""),),
        codes=("SS704",),
        what="gradients are never zeroed",
    ),
    "loss_made_anew": Plant(
        base=FINETUNE,
        wrong=(
            (
                "            loss.backward()\n",
                "            loss = torch.tensor(loss.item(), requires_grad=True)\n"
                "            loss.backward()\n",
            ),
        ),
        codes=("SS708",),
        what="a loss that needed gradients is made anew from its number",
    ),
    "stale_autocast": Plant(
        base=VISION,
        twin=(
            (
                "        loss = criterion(model(images), labels)\n",
                '        with torch.autocast("cpu", dtype=torch.bfloat16):\n'
                "            loss = criterion(model(images), labels)\n",
            ),
        ),
        wrong=(
            (
                '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            loss',
                "        loss",
            ),
            (
                "        train_epoch(model, train_loader, criterion, optimizer)\n",
                '        with torch.autocast("cpu", dtype=torch.bfloat16):\n'
                "            train_epoch(model, train_loader, criterion, optimizer)\n",
            ),
        ),
        codes=("SS312",),
        what="one autocast around a whole epoch",
    ),
    "padding_in_loss": Plant(
        base=TEXT,
        wrong=(
            ("nn.CrossEntropyLoss(ignore_index=PAD, ", "nn.CrossEntropyLoss("),
            (
                "            count = (targets != PAD).sum()\n",
                "            count = torch.tensor(targets.numel())\n",
            ),
            ("(targets != PAD).sum().item()]", "targets.numel()]"),
        ),
        what="padding counts as a class in the loss and in the perplexity",
    ),
    "own_token_count": Plant(
        base=TEXT,
        wrong=(
            ("            dist.all_reduce(count)\n", ""),
            ("targets) * world / count", "targets) / count"),
        ),
        codes=("SS307", "SS308"),
        what="the loss is divided by each rank's own number of tokens",
    ),
    "sum_of_gradients": Plant(
        base=MANUAL,
        wrong=(
            ("    size = float(dist.get_world_size())\n", ""),
            ("        param.grad /= size\n", ""),
        ),
        codes=("SS309",),
        what="gradients are summed over the ranks and not divided",
    ),
    "clip_before_average": Plant(
        base=MANUAL,
        wrong=(
            (
                "            average_gradients(model)\n"
                "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
                "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
                "            average_gradients(model)\n",
            ),
        ),
        codes=("SS303",),
        what="gradients are clipped on each rank before they are averaged",
    ),
    "summed_again": Plant(
        base=TEXT,
        twin=(("            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),),
        wrong=(
            (
                "            optimizer.step()\n",
                "            for param in model.parameters():\n"
                "                dist.all_reduce(param.grad)\n"
                "            optimizer.step()\n",
            ),
        ),
        codes=("SS309",),
        what="DDP's averaged gradients are summed over the ranks again",
    ),
    "norm_of_own_shard": Plant(
        base=FSDP,
        wrong=(
            (
                "            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)\n",
                "            grads = [p.grad.to_local() for p in model.parameters()]\n"
                "            norm = torch.stack([g.norm() for g in grads]).norm()\n"
                "            for grad in grads:\n"
                "                grad.mul_(min(1.0, 0.3 / (norm.item() + 1e-6)))\n",
            ),
        ),
        codes=("SS203", "SS303", "SS309"),
        what="each rank clips its shards by the norm of its shards (as BLOOM-176B, DeepSpeed #1801)",
    ),
    # The schedule.
    "cosine_of_epochs": Plant(
        base=VISION,
        wrong=(
            ("        scheduler.step()\n        if rank", "        if rank"),
            (
                "def train_epoch(model, loader, criterion, optimizer):",
                "def train_epoch(model, loader, criterion, optimizer, scheduler):",
            ),
            (_STEP, _STEP + "        scheduler.step()\n"),
            (
                "criterion, optimizer)\n        accuracy",
                "criterion, optimizer, scheduler)\n        accuracy",
            ),
        ),
        codes=("SS311",),
        what="a cosine over the epochs is stepped in each batch",
    ),
    "never_stepped": Plant(
        base=FINETUNE,
        wrong=(("        scheduler.step()\n", ""),),
        codes=("SS305",),
        what="the schedule is made and never stepped",
    ),
    "steps_of_one_rank": Plant(
        base=TEXT,
        wrong=(("epochs * len(train_loader)\n", "epochs * (len(train_set) // 8)\n"),),
        codes=("SS304",),
        what="the decay is as long as one rank alone would train",
    ),
    # Evaluation.
    "accuracy_of_rank_0": Plant(
        base=VISION,
        wrong=(("    dist.all_reduce(correct)\n", ""),),
        codes=("SS401", "SS404"),
        what="rank 0 shows the accuracy of its share, and saves by it",
    ),
    "not_gathered": Plant(
        base=ACCELERATE,
        wrong=(
            (
                "            predictions, references = accelerator.gather_for_metrics((predictions, targets))\n",
                "            references = targets\n",
            ),
        ),
        codes=("SS401",),
        what="the main process shows the accuracy of its share",
    ),
    "mean_of_means": Plant(
        base=LIGHTNING,
        wrong=(
            (
                "        sums = self.all_gather(self.sums).reshape(-1, 2).sum(0)\n"
                '        self.log("val_loss", sums[0] / sums[1], rank_zero_only=False, sync_dist=False)\n',
                '        self.log("val_loss", self.sums[0] / self.sums[1], sync_dist=True)\n',
            ),
        ),
        codes=("SS402",),
        what="sync_dist averages the means of 10 and of 9 samples (lightning #21859)",
    ),
    "no_eval_mode": Plant(
        base=VISION,
        wrong=(("    model.eval()\n", ""),),
        codes=("SS707",),
        what="dropout and batch normalisation are in training mode in evaluation",
    ),
    "left_in_eval_mode": Plant(
        base=FINETUNE,
        wrong=(
            ("        model.train()\n        running_loss", "        running_loss"),
            (
                "    for epoch in range(num_epochs):\n",
                "    model.train()\n    for epoch in range(num_epochs):\n",
            ),
        ),
        codes=("SS706",),
        what="train() is called once, eval() in each epoch",
    ),
    "attention_dropout": Plant(
        base=GPT,
        wrong=(("dropout_p=self.dropout if self.training else 0.0", "dropout_p=self.dropout"),),
        codes=("SS707",),
        what="attention drops in evaluation, too (transformers #33844)",
    ),
    "teacher_trains": Plant(
        base=DISTILL,
        wrong=(("    teacher.eval()\n", ""),),
        codes=("SS707",),
        what="the teacher is in training mode",
    ),
    "best_is_last": Plant(
        base=FINETUNE,
        wrong=(
            (
                "            best_weights = copy.deepcopy(model.state_dict())\n",
                "            best_weights = model.state_dict()\n",
            ),
        ),
        codes=("SS712",),
        what="the best weights are not copied: they are those of the last epoch",
    ),
}
"""The mistakes, by name."""

_SMALL = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(320, 16, generator=torch.Generator().manual_seed(8))
data = TensorDataset(x, x[:, :4].argmax(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""

_LOSS = "        loss = F.cross_entropy(model(inputs), labels)\n"
_MODEL = "model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))\n"
_ADAM = "optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)\n"
_BACKWARD = "        loss.backward()\n"

VARIATIONS: dict[str, tuple[str, Edits]] = {
    "label_smoothing": (
        VISION,
        (("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(label_smoothing=0.1)"),),
    ),
    "one_cycle": (
        VISION,
        (
            (
                "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)",
                "torch.optim.lr_scheduler.OneCycleLR(\n        optimizer, max_lr=0.1, "
                "epochs=epochs, steps_per_epoch=len(train_loader)\n    )",
            ),
            ("        scheduler.step()\n        if rank", "        if rank"),
            ("loader, criterion, optimizer):", "loader, criterion, optimizer, scheduler):"),
            (_STEP, _STEP + "        scheduler.step()\n"),
            ("loader, criterion, optimizer)\n", "loader, criterion, optimizer, scheduler)\n"),
        ),
    ),
    "warm_restarts": (
        VISION,
        (
            (
                "CosineAnnealingLR(optimizer, T_max=epochs)",
                "CosineAnnealingWarmRestarts(optimizer, T_0=2)",
            ),
        ),
    ),
    "plateau": (
        VISION,
        (
            (
                "CosineAnnealingLR(optimizer, T_max=epochs)",
                'ReduceLROnPlateau(optimizer, mode="max", patience=1)',
            ),
            ("        scheduler.step()\n", "        scheduler.step(accuracy)\n"),
        ),
    ),
    "frozen_stem": (
        VISION,
        (
            (
                "    model = DDP(build_model())\n",
                "    net = build_model()\n    net[0].requires_grad_(False)\n    model = DDP(net)\n",
            ),
            (
                "SGD(model.parameters(), lr",
                "SGD([p for p in model.parameters() if p.requires_grad], lr",
            ),
        ),
    ),
    "two_rates_no_decay_of_norms": (
        VISION,
        (
            (
                "SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)",
                "SGD(\n        [\n"
                '            {"params": [p for p in model.parameters() if p.ndim > 1]},\n'
                '            {"params": [p for p in model.parameters() if p.ndim < 2],\n'
                '             "weight_decay": 0.0, "lr": 0.02},\n'
                "        ],\n        lr=0.05, momentum=0.9, weight_decay=1e-4,\n    )",
            ),
        ),
    ),
    "early_stop_agreed": (
        VISION,
        (
            ("    best = 0.0\n", "    best, bad_epochs = 0.0, 0\n"),
            (
                "        if accuracy > best:\n            best = accuracy\n",
                "        bad_epochs = 0 if accuracy > best else bad_epochs + 1\n"
                "        if bad_epochs > 1:\n            break\n"
                "        if accuracy > best:\n            best = accuracy\n",
            ),
        ),
    ),
    "sampler_drops_last": (
        VISION,
        (("(train_set, shuffle=True)", "(train_set, shuffle=True, drop_last=True)"),),
    ),
    "exact_validation_shares": (
        VISION,
        (
            (
                "DataLoader(val_set, 32, sampler=DistributedSampler(val_set, shuffle=False))",
                "DataLoader(val_set, 32, sampler=range(rank, len(val_set), world_size))",
            ),
        ),
    ),
    "workers": (
        VISION,
        (
            (
                "batch_size=16, sampler=sampler)",
                "batch_size=16, sampler=sampler, num_workers=2, persistent_workers=True)",
            ),
        ),
    ),
    "rank_0_evaluates_all": (
        VISION,
        (
            ("    dist.all_reduce(correct)\n", ""),
            ("32, sampler=DistributedSampler(val_set, shuffle=False))", "batch_size=32)"),
            (
                "        accuracy = evaluate(model, val_loader)\n",
                "        accuracy = evaluate(model.module, val_loader) if rank == 0 else 0.0\n",
            ),
        ),
    ),
    "no_accumulation": (
        TRAINER,
        (('"--accumulate", type=int, default=2', '"--accumulate", type=int, default=1'),),
    ),
    "accumulate_four": (
        TRAINER,
        (('"--accumulate", type=int, default=2', '"--accumulate", type=int, default=4'),),
    ),
    "without_scaler": (
        TRAINER,
        (('GradScaler("cpu", init_scale=1024.0)', 'GradScaler("cpu", enabled=False)'),),
    ),
    "float32": (
        TRAINER,
        (
            (
                '                with torch.autocast("cpu", dtype=torch.bfloat16):\n                    loss',
                "                loss",
            ),
        ),
    ),
    "average_of_two_losses": (
        TRAINER,
        (
            (
                "                    loss = F.cross_entropy(self.model(source), targets) / accumulate\n",
                "                    logits = self.model(source)\n"
                "                    loss = F.cross_entropy(logits, targets)\n"
                "                    loss = (loss + 1e-3 * logits.float().logsumexp(1).pow(2).mean()) / accumulate\n",
            ),
        ),
    ),
    "gpt_without_dropout": (
        GPT,
        (("n_layer, dropout = 32, 4, 2, 0.1", "n_layer, dropout = 32, 4, 2, 0.0"),),
    ),
    "gpt_more_micro_steps": (
        GPT,
        (("gradient_accumulation_steps = 4\n", "gradient_accumulation_steps = 8\n"),),
    ),
    "gpt_all_evaluate": (
        GPT,
        (
            (
                "    if iter_num % eval_interval == 0 and master_process:\n        losses = estimate_loss()\n",
                "    losses = estimate_loss() if iter_num % eval_interval == 0 else None\n"
                "    if losses and master_process:\n",
            ),
            (
                "        out[split] = losses.mean()\n",
                "        out[split] = losses.mean()\n        if ddp:\n"
                "            all_reduce(out[split])\n"
                "            out[split] /= ddp_world_size\n",
            ),
            (
                "import destroy_process_group, init_process_group",
                "import all_reduce, destroy_process_group, init_process_group",
            ),
        ),
    ),
    "unfrozen_later": (
        FINETUNE,
        (
            (
                "optimizer = optim.SGD",
                "model.backbone.requires_grad_(False)\noptimizer = optim.SGD",
            ),
            (
                "        model.train()\n",
                "        model.backbone.requires_grad_(epoch >= 1)\n        model.train()\n",
            ),
        ),
    ),
    "frozen_norms": (
        FINETUNE,
        (("        model.train()\n", "        model.train()\n        model.backbone[1].eval()\n"),),
    ),
    "closure": (
        FINETUNE,
        (
            (
                "            optimizer.zero_grad()\n            outputs = model(inputs)\n"
                "            loss = criterion(outputs, labels)\n            loss.backward()\n"
                "            optimizer.step()\n",
                "            def closure():\n                optimizer.zero_grad()\n"
                "                loss = criterion(model(inputs), labels)\n"
                "                loss.backward()\n                return loss\n\n"
                "            loss = optimizer.step(closure)\n",
            ),
            (
                "optim.SGD(model.parameters(), lr=0.02, momentum=0.9)",
                "optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)",
            ),
        ),
    ),
    "sharpness_aware": (
        FINETUNE,
        (
            (
                "            loss.backward()\n            optimizer.step()\n",
                "            loss.backward()\n"
                "            with torch.no_grad():\n"
                "                params = [p for p in model.parameters() if p.grad is not None]\n"
                "                norm = torch.stack([p.grad.norm() for p in params]).norm()\n"
                "                moves = [p.grad * (0.05 / (norm + 1e-12)) for p in params]\n"
                "                torch._foreach_add_(params, moves)\n"
                "            optimizer.zero_grad()\n"
                "            criterion(model(inputs), labels).backward()\n"
                "            with torch.no_grad():\n"
                "                torch._foreach_sub_(params, moves)\n"
                "            optimizer.step()\n",
            ),
        ),
    ),
    "stochastic_weight_averaging": (
        FINETUNE,
        (
            (
                "    model.load_state_dict(best_weights)\n    return model\n",
                '    torch.optim.swa_utils.update_bn(loaders["train"], averaged)\n    return averaged.module\n',
            ),
            (
                "        scheduler.step()\n",
                "        scheduler.step()\n        averaged.update_parameters(model)\n",
            ),
            (
                "    for epoch in range(num_epochs):\n",
                "    averaged = torch.optim.swa_utils.AveragedModel(model)\n    for epoch in range(num_epochs):\n",
            ),
        ),
    ),
    "weighted_sampler": (
        FINETUNE,
        (
            (
                "DataLoader(train_set, batch_size=16, shuffle=True)",
                "DataLoader(\n        train_set, 16,\n"
                "        sampler=torch.utils.data.WeightedRandomSampler(torch.ones(480), 480),\n    )",
            ),
        ),
    ),
    "sum_per_sample_by_world": (
        TEXT,
        (
            (
                "            dist.all_reduce(count)\n",
                "            dist.all_reduce(count)\n            count = count / world\n",
            ),
            ("targets) * world / count", "targets) / count"),
        ),
    ),
    "text_without_clipping": (
        TEXT,
        (
            (
                "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
                "            nn.utils.clip_grad_value_(model.parameters(), 0.5)\n",
            ),
        ),
    ),
    "stream_in_process": (STREAM, (("batch_size=8, num_workers=2)", "batch_size=8)"),)),
    "by_hand_without_clipping": (
        MANUAL,
        (("            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n", ""),),
    ),
    "by_hand_flat": (
        MANUAL,
        (
            (
                "    for param in model.parameters():\n        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)\n        param.grad /= size\n",
                "    flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])\n"
                "    dist.all_reduce(flat)\n"
                "    at = 0\n"
                "    for param in model.parameters():\n"
                "        param.grad.copy_(flat[at : at + param.numel()].view_as(param) / size)\n"
                "        at += param.numel()\n",
            ),
        ),
    ),
    "distil_features": (
        DISTILL,
        (
            (
                "            loss = 0.7 * hard + 0.3 * 4.0 * soft\n",
                "            loss = 0.7 * hard + 0.3 * 4.0 * soft\n"
                "            loss = loss + 1e-4 * sum(p.square().sum() for p in model.parameters())\n",
            ),
        ),
    ),
    "lightning_means": (
        LIGHTNING,
        (
            (
                "        errors = (self(x) - y).square()\n"
                "        self.sums += torch.stack([errors.sum(), errors.new_tensor(len(errors))])\n",
                '        self.log("val_loss", nn.functional.mse_loss(self(x), y), sync_dist=True)\n',
            ),
            (
                "    def on_validation_epoch_end(self):\n"
                "        sums = self.all_gather(self.sums).reshape(-1, 2).sum(0)\n"
                '        self.log("val_loss", sums[0] / sums[1], rank_zero_only=False, sync_dist=False)\n'
                "        self.sums.zero_()\n\n",
                "",
            ),
            ("range(400, 419)", "range(400, 424)"),
            ("torch.randn(419, 8)", "torch.randn(424, 8)"),
        ),
    ),
    "lightning_accumulates": (
        LIGHTNING,
        (("max_epochs=3,", "max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5,"),),
    ),
    "accelerate_plain": (ACCELERATE, ((", gradient_accumulation_steps=2)", ")"),)),
    "fsdp_without_clipping": (
        FSDP,
        (("            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)\n", ""),),
    ),
    "checkpointing": (
        _SMALL,
        (
            (
                _MODEL,
                "from torch.utils.checkpoint import checkpoint\n\n\n"
                "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
                "        self.body = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh())\n"
                "        self.head = nn.Linear(32, 4)\n\n"
                "    def forward(self, x):\n"
                "        return self.head(checkpoint(self.body, x, use_reentrant=False))\n\n\n"
                "model = DDP(Net())\ntorch.manual_seed(1 + rank)\n",
            ),
        ),
    ),
    "sync_batch_norm": (
        _SMALL,
        (
            (
                _MODEL,
                "net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))\n"
                "model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(net))\n",
            ),
        ),
    ),
    "zero_redundancy": (
        _SMALL,
        (
            (
                _ADAM,
                "from torch.distributed.optim import ZeroRedundancyOptimizer\n\n"
                "optimizer = ZeroRedundancyOptimizer(\n"
                "    model.parameters(), optimizer_class=torch.optim.Adam, lr=3e-3\n)\n",
            ),
        ),
    ),
    "bf16_hook": (
        _SMALL,
        (
            (
                _ADAM,
                "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n\n"
                "model.register_comm_hook(None, default_hooks.bf16_compress_hook)\n" + _ADAM,
            ),
        ),
    ),
    "static_graph_unused_head": (
        _SMALL,
        (
            (
                _MODEL,
                "class Heads(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
                "        self.body = nn.Linear(16, 32)\n"
                "        self.heads = nn.ModuleList([nn.Linear(32, 4), nn.Linear(32, 4)])\n\n"
                "    def forward(self, x, task):\n"
                "        return self.heads[task](F.relu(self.body(x)))\n\n\n"
                "model = DDP(Heads(), find_unused_parameters=True)\n",
            ),
            (
                "    for inputs, labels in loader:\n",
                "    for step, (inputs, labels) in enumerate(loader):\n",
            ),
            (_LOSS, _LOSS.replace("model(inputs)", "model(inputs, step % 2)")),
        ),
    ),
    "gradient_penalty": (
        _SMALL,
        (
            (
                _LOSS,
                "        inputs.requires_grad_()\n        logits = model(inputs)\n"
                "        loss = F.cross_entropy(logits, labels)\n"
                "        (slope,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)\n"
                "        loss = loss + 0.01 * slope.square().sum(1).mean()\n",
            ),
        ),
    ),
    "entropy_bonus": (
        _SMALL,
        (
            (
                _LOSS,
                "        logits = model(inputs)\n"
                "        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()\n"
                "        loss = F.cross_entropy(logits, labels) - 0.01 * entropy\n",
            ),
        ),
    ),
    "noisy_gradients": (
        _SMALL,
        (
            (
                _BACKWARD,
                _BACKWARD + "        noise = torch.Generator().manual_seed(epoch)\n"
                "        for p in model.parameters():\n"
                "            p.grad += 1e-3 * torch.randn(p.shape, generator=noise)\n",
            ),
        ),
    ),
    "cutmix": (
        _SMALL,
        (
            (
                _LOSS,
                "        share = torch.distributions.Beta(1.0, 1.0).sample()\n"
                "        other = torch.randperm(len(inputs))\n"
                "        mask = (torch.rand(16) < share).float()\n"
                "        logits = model(inputs * mask + inputs[other] * (1 - mask))\n"
                "        loss = share * F.cross_entropy(logits, labels)\n"
                "        loss = loss + (1 - share) * F.cross_entropy(logits, labels[other])\n",
            ),
            (_MODEL, _MODEL + "torch.manual_seed(50 + rank)\n"),
        ),
    ),
    "contrastive_gathered": (
        _SMALL,
        (
            (
                "import torch.distributed as dist\n",
                "import torch.distributed as dist\nimport torch.distributed.nn\n",
            ),
            (
                _LOSS,
                "        a = F.normalize(model(inputs + 0.1 * torch.randn_like(inputs)), dim=1)\n"
                "        b = F.normalize(model(inputs + 0.1 * torch.randn_like(inputs)), dim=1)\n"
                "        all_b = torch.cat(torch.distributed.nn.all_gather(b))\n"
                "        target = torch.arange(len(a)) + rank * len(a)\n"
                "        loss = F.cross_entropy(a @ all_b.T / 0.2, target)\n",
            ),
            (_MODEL, _MODEL + "torch.manual_seed(50 + rank)\n"),
        ),
    ),
    "uneven_with_join": (
        _SMALL,
        (
            (
                "sampler = DistributedSampler(data)\n",
                "share = torch.utils.data.Subset(data, range(0, 170) if rank == 0 else range(170, 320))\n",
            ),
            (
                "loader = DataLoader(data, batch_size=8, sampler=sampler)\n",
                "loader = DataLoader(share, batch_size=8, shuffle=True)\n",
            ),
            (
                "    sampler.set_epoch(epoch)\n    for inputs, labels in loader:\n        loss = F.cross_entropy(model(inputs), labels)\n        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n",
                "    with model.join():\n        for inputs, labels in loader:\n            loss = F.cross_entropy(model(inputs), labels)\n            optimizer.zero_grad()\n            loss.backward()\n            optimizer.step()\n",
            ),
            (_MODEL, _MODEL + "torch.manual_seed(3)\n"),
        ),
    ),
    "per_rank_logs": (
        _SMALL,
        (
            (
                "dist.barrier()\n",
                'torch.save(optimizer.state_dict(), f"optimizer-{rank}.pt")\ndist.barrier()\n',
            ),
            (
                "        optimizer.step()\n",
                '        optimizer.step()\n    with open(f"rank-{rank}.log", "a") as log:\n        log.write(f"{epoch} {loss.item()}\\n")\n',
            ),
        ),
    ),
    "two_optimizers": (
        _SMALL,
        (
            (
                _ADAM,
                "head = torch.optim.Adam(model.module[2].parameters(), lr=3e-3)\noptimizer = torch.optim.SGD(model.module[0].parameters(), lr=0.05)\n",
            ),
            (
                "        optimizer.zero_grad()\n",
                "        optimizer.zero_grad()\n        head.zero_grad()\n",
            ),
            ("        optimizer.step()\n", "        optimizer.step()\n        head.step()\n"),
        ),
    ),
    "resumed": (
        _SMALL,
        (
            (
                _ADAM + "for epoch in range(3):\n",
                "import os\n\n" + _ADAM + 'start = 0\nif os.path.exists("last.pt"):\n'
                '    state = torch.load("last.pt", map_location="cpu", weights_only=True)\n'
                '    model.module.load_state_dict(state["model"])\n'
                '    optimizer.load_state_dict(state["optimizer"])\n'
                '    start = state["epoch"] + 1\nfor epoch in range(start, 3):\n',
            ),
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n    if rank == 0:\n"
                '        state = {"model": model.module.state_dict(), "epoch": epoch,\n'
                '                 "optimizer": optimizer.state_dict()}\n'
                '        torch.save(state, "last.tmp")\n        os.replace("last.tmp", "last.pt")\n',
            ),
        ),
    ),
}
"""Right scripts: a base with something in it that a rule may mistake for an error."""

ALONE: dict[str, str] = {
    "gan": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
real_data = torch.randn(512, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.7]]) + 2.0
loader = DataLoader(TensorDataset(real_data), batch_size=16, shuffle=True)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(
    nn.utils.parametrizations.spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2), nn.Linear(32, 1)
)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
for epoch in range(3):
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 8))
        opt_d.zero_grad()
        loss_d = bce(critic(real), torch.ones(len(real), 1))
        loss_d = loss_d + bce(critic(fake.detach()), torch.zeros(len(real), 1))
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = bce(critic(fake), torch.ones(len(real), 1))
        loss_g.backward()
        opt_g.step()
    print(f"{epoch}: D {loss_d.item():.3f} G {loss_g.item():.3f}")
""",
    "vae": """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(64, 32)
        self.mean, self.log_var = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        h = F.relu(self.encode(x))
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(z), mean, log_var


def loss_function(logits, x, mean, log_var):
    bce = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())


torch.manual_seed(1)
images = (torch.rand(480, 64) > 0.7).float()
train_loader = DataLoader(TensorDataset(images[:400]), batch_size=20, shuffle=True)
test_loader = DataLoader(TensorDataset(images[400:]), batch_size=20)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1, 4):
    model.train()
    train_loss = 0
    for (x,) in train_loader:
        optimizer.zero_grad()
        loss = loss_function(*((out := model(x))[0], x, *out[1:]))
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        test_loss = sum(loss_function((o := model(x))[0], x, *o[1:]).item() for (x,) in test_loader)
        torch.save(torch.sigmoid(model.decode(torch.randn(8, 4))), f"sample_{epoch}.pt")
    print(f"epoch {epoch}: train {train_loss / 400:.2f} test {test_loss / 80:.2f}")
""",
    "reinforce": """\
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(2)
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
weights = torch.tensor([1.0, -1.0, 0.5, 0.2])
for episode in range(30):
    log_probs, rewards = [], []
    state = torch.randn(4)
    for _ in range(20):
        action = Categorical(logits=policy(state))
        choice = action.sample()
        log_probs.append(action.log_prob(choice))
        rewards.append(float((state @ weights > 0) == bool(choice)))
        state = torch.randn(4)
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.9 * total
        returns.insert(0, total)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    loss = -(torch.stack(log_probs) * returns).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 10 == 0:
        print(episode, sum(rewards))
""",
    "characters": """\
import torch
from torch import nn

text = "the quick brown fox jumps over the lazy dog. " * 60
letters = sorted(set(text))
codes = torch.tensor([letters.index(c) for c in text])
torch.manual_seed(0)


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(letters), 16)
        self.rnn = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, len(letters))

    def forward(self, x, state=None):
        hidden, state = self.rnn(self.embed(x), state)
        return self.out(hidden), state


model = CharRNN()
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
rows = codes[: len(codes) // 8 * 8].view(8, -1)
for epoch in range(3):
    state = None
    for start in range(0, rows.size(1) - 17, 16):
        x, y = rows[:, start : start + 16], rows[:, start + 1 : start + 17]
        logits, state = model(x, state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
""",
    "citations": """\
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

torch.manual_seed(0)
edges = torch.randint(0, 120, (2, 600))
labels = torch.arange(120) % 3
x = F.one_hot(labels, 3).float() + torch.randn(120, 3)
data = Data(x=x, edge_index=edges, y=labels)
data.train_mask = torch.arange(120) < 80


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(3, 16), GCNConv(16, 3)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(F.dropout(x, p=0.5, training=self.training), edge_index))
        return self.conv2(F.dropout(x, p=0.5, training=self.training), edge_index)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(1, 21):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(1) == data.y
    print(f"{epoch}: loss {loss:.3f} test {right[~data.train_mask].float().mean():.3f}")
""",
    "folds": """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(0)
x = torch.randn(300, 10)
data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
scores = []
for fold in range(3):
    held = set(range(fold * 100, (fold + 1) * 100))
    train = DataLoader(Subset(data, [i for i in range(300) if i not in held]), 10, shuffle=True)
    test = DataLoader(Subset(data, sorted(held)), 50)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model.train()
        for inputs, labels in train:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.inference_mode():
        scores.append(sum((model(a).argmax(1) == b).sum().item() for a, b in test) / 100)
    print(f"fold {fold}: {scores[-1]:.3f}")
print("mean", sum(scores) / 3)
""",
    "fabric": """\
import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import os

world = int(os.environ.get("WORLD_SIZE", 1))
fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
fabric.launch()
seed_everything(7)
x = torch.randn(320, 12)
loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for epoch in range(3):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"epoch {epoch} last loss {mean:.4f}")
fabric.save("state.pt", {"model": model})
""",
    "huggingface_trainer": """\
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 60, (size, 12), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids),
                "labels": int(ids[:6].sum() > ids[6:].sum())}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                    intermediate_size=64, max_position_embeddings=16)
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, learning_rate=1e-3,
    eval_strategy="epoch", save_strategy="no", logging_steps=5, report_to=[], use_cpu=True,
    warmup_steps=5,
)
trainer = Trainer(model=BertForSequenceClassification(config), args=arguments,
                  train_dataset=Rows(320, 0), eval_dataset=Rows(80, 1), compute_metrics=accuracy)
trainer.train()
trainer.save_model("out/last")
""",
    "spawned": """\
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def worker(rank, world):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    x = torch.randn(320, 10, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, 8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2, join=True)
""",
}
"""More right scripts, each of a shape of its own."""


def clean() -> dict[str, str]:
    """Return the right scripts by name, each text once: twins first."""
    named = {f"twin_of_{name}": plant.right for name, plant in PLANTS.items()}
    named |= {name: edited(*variation) for name, variation in VARIATIONS.items()} | ALONE
    names = {text: name for name, text in reversed(named.items())}
    return {name: text for name, text in named.items() if names[text] == name}


def main() -> None:
    """Write them into a folder: planted/NAME/train.py and clean/NAME/train.py."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    texts = {f"planted/{name}": plant.text for name, plant in PLANTS.items()}
    texts |= {f"clean/{name}": text for name, text in clean().items()}
    for name, text in texts.items():
        if not names or Path(name).name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "train.py").write_text(text)


if __name__ == "__main__":
    main()
