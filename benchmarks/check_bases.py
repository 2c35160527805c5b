"""Training scripts without a mistake, as people write them: functions, classes, one flat file.

`check_plants.py` plants mistakes into them.
"""

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


SMALL = """\
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
"""The least that DDP needs."""

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
