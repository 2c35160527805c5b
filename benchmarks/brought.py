"""Train what people bring by their own loop, and by samestep: CPU seconds of an epoch, one rank.

    python benchmarks/brought.py [--only dlinear,…] [--rounds 3]

Both ways run in one process and take turns, an epoch each: a machine's speed changes within
seconds, and so it changes for both. Writes `benchmarks/results/brought.md`.
"""

import argparse
import copy
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import heading, machine
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

PAGE = Path(__file__).parent / "results" / "brought.md"
EPOCHS = 30
WARM_UP = 3
QUIET: dict[str, Any] = {"quiet": True, "nproc": 1, "device": "cpu", "threads": 1}

Epoch = Callable[[], None]
"""Trains an epoch; of our way, what is called at the end of each."""


@dataclass(frozen=True)
class Training:
    """One training, both ways."""

    what: str
    plain: Callable[[Path], Epoch]
    """(a folder) → what trains an epoch."""
    ours: Callable[[Path, Epoch], None]
    """Trains `EPOCHS` epochs and calls the function after each."""
    limit: float | None
    """None: the row shows what could be reached."""
    epochs: int = EPOCHS


def main() -> int:
    """Measure, write the page, and return 1 if a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*TRAININGS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help="a training, in this process")
    asked = parser.parse_args()
    if asked.one:
        with tempfile.TemporaryDirectory() as folder:
            torch.set_num_threads(1)
            training = TRAININGS[asked.one]
            globals()["EPOCHS"] = training.epochs
            print(json.dumps(_in_turn(training, Path(folder))), file=sys.__stdout__)
        return 0
    facts, rows, missed = machine(), [], False
    for name in asked.only:
        training, rounds = TRAININGS[name], [_measured(name) for _ in range(asked.rounds)]
        ratios = [statistics.median(plain / ours for plain, ours in pairs) for pairs in rounds]
        middle = statistics.median(ratios)
        every = [pair for pairs in rounds for pair in pairs]
        shown = [f"{1e3 * statistics.median(way):.1f}" for way in zip(*every, strict=True)]
        ratio = f"{middle:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        wanted = verdict = "–"
        if training.limit is not None:
            wanted = f"≥ {training.limit}"
            verdict = "reached" if round(middle, 2) >= training.limit else "**missed**"
        rows.append(f"| {' | '.join([training.what, *shown, ratio, wanted, verdict])} |")
        print(rows[-1], flush=True)
        missed = missed or verdict == "**missed**"
    lines = [
        *heading("What people bring, as fast as by their own loop", facts),
        "| training | own loop, ms | samestep, ms | speed over the own loop's | wanted | |",
        "|---|---:|---:|---:|---:|---|",
        *rows,
        "",
        "- CPU time of an epoch, with whatever happens between two epochs, on one rank and one",
        f"  thread. In each of {asked.rounds} processes both took turns, {EPOCHS} epochs each if",
        f"  the row has no other number. The first {WARM_UP} are left out; a ratio is the median",
        "  of a process's pairs. samestep records 200 to 500 steps of a training, with losses,",
        "  rates and norms, and each step of one of fewer than 400; most loops record nothing.",
        "- Only GRPO's loop saves checkpoints, both ways: the own one by `torch.save`, without a",
        "  sync, a hash or an index; in the row below it with them, as samestep promises them.",
        "  samestep's thread may have another core, and counts here.",
        "- By a plain loop instead of samestep: the most that could be had without a Trainer. It",
        "  records nothing, and saves nothing.",
        "- The spiral's own loops are benchmarks/peers/spiral_slicing.py and spiral_compiled.py.",
        "- The spiral beside other trainers is in spiral.md, the start in startup.md.",
    ]
    PAGE.write_text("\n".join([*lines, ""]))
    return int(missed)


def _measured(name: str) -> list[tuple[float, float]]:
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--one", name]
    done = subprocess.run(
        command, env=os.environ | quiet, check=True, stdout=subprocess.PIPE, text=True
    )
    return [(plain, ours) for plain, ours in json.loads(done.stdout.splitlines()[-1])]


def _in_turn(training: Training, folder: Path) -> list[tuple[float, float]]:
    """Return the CPU seconds of an epoch of each way, for each turn."""
    (folder / "plain").mkdir()
    train_epoch, pairs = training.plain(folder / "plain"), []
    began = time.process_time()

    def turn() -> None:
        nonlocal began
        middle = time.process_time()
        train_epoch()
        ended = time.process_time()
        pairs.append((ended - middle, middle - began))
        began = ended

    training.ours(folder / "ours", turn)
    return pairs[WARM_UP:]


def _recipe(recipe: Any, folder: Path, turn: Epoch, **settings: Any) -> None:
    """Train a recipe, without checkpoints before the end."""
    import samestep

    def note(record: Mapping[str, Any]) -> None:
        if record["event"] == "epoch":
            turn()

    how: dict[str, Any] = {"epochs": EPOCHS, "checkpoint_every_epochs": EPOCHS, **QUIET}
    samestep.train(replace(recipe, on_record=note), run_dir=folder, **how, **settings)


def _opened(folder: Path, train: Callable[[Any], Any], **how: Any) -> None:
    """Run a loop of one's own, which calls its turn after each epoch."""
    import samestep

    with samestep.open_run(folder, device="cpu", **how) as run:
        train(run)


def _by_epoch(fit: Callable[[Epoch], Any]) -> Epoch:
    """Return what lets a trainer's own loop train one more epoch; `fit` calls back after each."""
    goes_on, has_ended = threading.Semaphore(0), threading.Semaphore(0)

    def pause() -> None:
        has_ended.release()
        goes_on.acquire()

    def train_epoch() -> None:
        goes_on.release()
        has_ended.acquire()

    def run() -> None:
        goes_on.acquire()
        fit(pause)

    threading.Thread(target=run, daemon=True).start()
    return train_epoch


def _loop(model: nn.Module, optimizer: Any, data: Any, loss_of: Any, size: int, **how: Any) -> Any:
    """Return a plain loop over a DataLoader."""
    loader = DataLoader(data, batch_size=size, shuffle=True, **how)

    def train_epoch() -> None:
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()

    return train_epoch


# --- a map-style data set of one's own, small steps


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of several series: what was seen, and what comes next."""

    def __init__(self, number: int) -> None:
        self.series = torch.randn(number + 119, 7, generator=torch.Generator().manual_seed(0))
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.series[place : place + 96], self.series[place + 96 : place + 120]


class DLinear(nn.Module):
    """A linear layer for the trend, and one for the rest (Zeng et al., 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.trend, self.rest = nn.Linear(96, 24), nn.Linear(96, 24)

    def forward(self, seen: Tensor) -> Tensor:
        """Return (batch, 24, series) for (batch, 96, series)."""
        seen = seen.transpose(1, 2)
        trend = functional.avg_pool1d(seen, 25, 1, 12, count_include_pad=False)
        return (self.trend(trend) + self.rest(seen - trend)).transpose(1, 2)


def _windows(number: int, epochs: int = EPOCHS) -> Training:
    def plain(_: Path) -> Epoch:
        model = DLinear()
        optimizer = torch.optim.Adam(model.parameters())

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            return functional.mse_loss(model(batch[0]), batch[1])

        return _loop(model, optimizer, Windows(number), loss_of, 32)

    def ours(folder: Path, turn: Epoch) -> None:
        from samestep import Recipe, Splits

        recipe = Recipe(
            model=DLinear, data=lambda: Splits(train=Windows(number)), loss=functional.mse_loss,
            metrics={}, settings={"batch_size": 32, "lr": 1e-3},
        )  # fmt: skip
        _recipe(recipe, folder, turn)

    what = f"DLinear, {number:,} windows of a Dataset, {epochs} epochs"
    return Training(what, plain, ours, 1.0, epochs)


# --- the spiral, by the least that a loop can do


def _spiral_plain(peer: str) -> Epoch:
    sys.path.append(str(Path(__file__).parent / "peers"))
    train_epoch = importlib.import_module(peer).train_epoch
    return lambda: train_epoch(0)


def _spiral(peer: str, what: str, limit: float, **settings: Any) -> Training:
    def ours(folder: Path, turn: Epoch) -> None:
        from samestep.core.recipes.spiral import recipe

        _recipe(recipe, folder, turn, batch_size=32, eval_every_epochs=epochs, **settings)

    epochs = 100
    return Training(f"{what}, {epochs} epochs", lambda _: _spiral_plain(peer), ours, limit, epochs)


# --- loops of one's own


def _views(model: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of two views of the same points, as DINO has it."""
    first, second = x + 0.1, x - 0.1
    with torch.no_grad():
        wanted = functional.softmax(teacher(first) / 0.04, dim=1)
    return -(wanted * functional.log_softmax(model(second) / 0.1, dim=1)).sum(1).mean()


def _mlp(width: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64)
    )


def _points(number: int = 2048) -> Tensor:
    return torch.randn(number, 64, generator=torch.Generator().manual_seed(0))


def _follow(teacher: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.01)


def _dino_plain(_: Path) -> Epoch:
    model = _mlp()
    teacher, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(_points()), batch_size=32, shuffle=True)

    def train_epoch() -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            _views(model, teacher, x).backward()
            optimizer.step()
            _follow(teacher, model)

    return train_epoch


def _dino_ours(folder: Path, turn: Epoch) -> None:
    def loop(run: Any) -> None:
        model = run.place(_mlp())
        teacher, optimizer = copy.deepcopy(model), torch.optim.AdamW(model.parameters())
        state = {"model": model, "teacher": teacher, "optimizer": optimizer}
        points = _points()
        for _ in run.epochs(EPOCHS, state=state):
            for batch in run.batches(points, 32):
                loss = _views(model, teacher, batch.data)
                optimizer.zero_grad()
                run.backward(loss, model)
                optimizer.step()
                _follow(teacher, model)
                run.log(loss=loss)
            turn()

    _opened(folder, loop, checkpoint_every_epochs=EPOCHS)


def _policy_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of answers in groups of eight, as GRPO has it."""
    logits = model(x).repeat_interleave(8, 0).log_softmax(1)
    drawn = torch.multinomial(logits.exp(), 1)
    reward = (drawn % 2).float().view(-1, 8)
    gain = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    return -(gain.flatten() * logits.gather(1, drawn).squeeze(1)).mean()


def _save_for_good(kept: Any, path: Path) -> None:
    """Save as samestep does: whole, on the disk, with a hash in an index, or not at all."""
    new = path.with_suffix(".tmp")
    torch.save(kept, new)
    index = {"file": path.name, "sha256": hashlib.sha256(new.read_bytes()).hexdigest()}
    _sync(new)
    new.rename(path)
    _sync(path.parent)
    new = path.with_name("index.tmp")
    new.write_text(json.dumps(index))
    _sync(new)
    new.rename(path.with_name("index.json"))
    _sync(path.parent)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    os.close(opened)


def _grpo_plain(folder: Path, save: Callable[[Any, Path], None] = torch.save) -> Epoch:
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    loader, steps = DataLoader(TensorDataset(_points(640)), batch_size=16, shuffle=True), [0]

    def train_epoch() -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            _policy_loss(model, x).backward()
            optimizer.step()
            steps[0] += 1
            if steps[0] % 5 == 0:
                kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(kept, folder / f"step-{steps[0]}.pt")

    return train_epoch


def _grpo_ours(folder: Path, turn: Epoch) -> None:
    def loop(run: Any) -> None:
        model = run.place(_mlp())
        optimizer, points = torch.optim.AdamW(model.parameters()), _points(640)
        for _ in run.epochs(EPOCHS, state={"model": model, "optimizer": optimizer}):
            for batch in run.batches(points, 16):
                loss = _policy_loss(model, batch.data)
                optimizer.zero_grad()
                run.backward(loss, model)
                optimizer.step()
                run.log(loss=loss)
            turn()

    _opened(folder, loop, checkpoint_every_steps=5, keep_newest=3)


def _layers() -> list[nn.Module]:
    return [nn.Linear(64, 256), nn.Linear(256, 256)]


def _goodness(layer: nn.Module, good: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's loss (Hinton, 2022), and its outputs of both."""
    unit = (x / (x.norm(dim=1, keepdim=True) + 1e-4) for x in (good, bad))
    one, other = (functional.relu(layer(x)) for x in unit)
    margins = torch.cat([2 - one.square().mean(1), other.square().mean(1) - 2])
    return functional.softplus(margins).mean(), one.detach(), other.detach()


def _forward_plain(_: Path) -> Epoch:
    layers = _layers()
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]
    loader = DataLoader(TensorDataset(_points()), batch_size=64, shuffle=True)

    def train_epoch() -> None:
        for (points,) in loader:
            good, bad = points, points.flip(1)
            for layer, optimizer in zip(layers, optimizers, strict=True):
                loss, good, bad = _goodness(layer, good, bad)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return train_epoch


def _forward_ours(folder: Path, turn: Epoch) -> None:
    def loop(run: Any) -> None:
        layers = [run.place(layer) for layer in _layers()]
        optimizers = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]
        state = {f"layer {n}": layer for n, layer in enumerate(layers)}
        state |= {f"optimizer {n}": one for n, one in enumerate(optimizers)}
        points = _points()
        for _ in run.epochs(EPOCHS, state=state):
            for batch in run.batches(points, 64):
                good, bad = batch.data, batch.data.flip(1)
                for layer, optimizer in zip(layers, optimizers, strict=True):
                    loss, good, bad = _goodness(layer, good, bad)
                    optimizer.zero_grad()
                    run.backward(loss, layer)
                    optimizer.step()
                run.log(loss=loss)
            turn()

    _opened(folder, loop, checkpoint_every_epochs=EPOCHS)


# --- recipes: speech by CTC, a GPT with Muon


class Speech(nn.Module):
    """An LSTM over frames."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 12)

    def forward(self, frames: Tensor) -> Tensor:
        """Return log-probabilities (batch, frames, 12)."""
        return self.head(self.lstm(frames)[0]).log_softmax(2)


class Spoken(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 20 to 40 frames, and what was said."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(20, 41, (512,), generator=draw).tolist()
        self.frames = [torch.randn(n, 16, generator=draw) for n in lengths]
        self.texts = [torch.randint(1, 12, (6,), generator=draw) for _ in lengths]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.frames[place], self.texts[place]


def _padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    frames, texts = zip(*samples, strict=True)
    lengths = torch.tensor([len(one) for one in frames])
    return nn.utils.rnn.pad_sequence(frames, batch_first=True), (torch.stack(texts), lengths)


def _ctc(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    texts, lengths = targets
    sizes = torch.full((len(texts),), texts.shape[1])
    loss = functional.ctc_loss(outputs.transpose(0, 1), texts, lengths, sizes, reduction="none")
    return loss.mean()


def _ctc_plain(_: Path) -> Epoch:
    model = Speech()
    optimizer = torch.optim.Adam(model.parameters())

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return _ctc(model(batch[0]), batch[1])

    return _loop(model, optimizer, Spoken(), loss_of, 16, collate_fn=_padded)


def _ctc_ours(folder: Path, turn: Epoch) -> None:
    from samestep import Recipe, Splits

    recipe = Recipe(
        model=Speech, data=lambda: Splits(train=Spoken()), loss=_ctc, collate=_padded, metrics={},
        settings={"batch_size": 16, "lr": 1e-3},
    )  # fmt: skip
    _recipe(recipe, folder, turn)


class GPT(nn.Module):
    """Two blocks on 32 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        block = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (batch, 64, characters)."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.blocks(self.embed(text), mask=mask, is_causal=True)).transpose(1, 2)


def _texts() -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 64, (512, 33), generator=torch.Generator().manual_seed(0))
    return text[:, :-1], text[:, 1:]


def _both(model: nn.Module, *_: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "blocks" not in n]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


def _gpt_plain(_: Path) -> Epoch:
    model = GPT()
    optimizers = _both(model)
    loader = DataLoader(TensorDataset(*_texts()), batch_size=16, shuffle=True)

    def train_epoch() -> None:
        for text, following in loader:
            model.zero_grad()
            functional.cross_entropy(model(text), following).backward()
            for optimizer in optimizers:
                optimizer.step()

    return train_epoch


def _gpt_ours(folder: Path, turn: Epoch) -> None:
    from samestep import Recipe, Splits

    recipe = Recipe(
        model=GPT, data=lambda: Splits(train=_texts()), loss=functional.cross_entropy, metrics={},
        optimizer=_both, settings={"batch_size": 16, "lr": 1e-3},
    )  # fmt: skip
    _recipe(recipe, folder, turn)


# --- trainers


def _bert(folder: Path) -> dict[str, Any]:
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 100, (512, 16), generator=draw)
    rows = [{"input_ids": one, "labels": int(one.sum() > 800)} for one in ids]
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    args = TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=16, num_train_epochs=EPOCHS, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=50,
    )  # fmt: skip
    return {"model": BertForSequenceClassification(config), "args": args, "train_dataset": rows}


def _trainer_plain(folder: Path) -> Epoch:
    from transformers import Trainer, TrainerCallback

    class Turns(TrainerCallback):
        def __init__(self, pause: Epoch) -> None:
            self.pause = pause

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.pause()

    sys.stdout = sys.stderr
    return _by_epoch(lambda pause: Trainer(**_bert(folder), callbacks=[Turns(pause)]).train())


def _trainer_ours(folder: Path, turn: Epoch) -> None:
    import samestep.huggingface

    _recipe(samestep.huggingface.recipe(**_bert(folder)), folder, turn)


def _looped(train_epoch: Epoch, turn: Epoch) -> None:
    """Train by a plain loop in samestep's place."""
    for _ in range(EPOCHS):
        train_epoch()
        turn()


def _trainer_looped(folder: Path, turn: Epoch) -> None:
    from transformers import default_data_collator

    model, args, data = _bert(folder).values()
    betas = (args.adam_beta1, args.adam_beta2)
    fused = "fused" in args.optim
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, betas, fused=fused)
    steps = EPOCHS * len(data) // args.per_device_train_batch_size
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    size = args.per_device_train_batch_size
    loader = DataLoader(data, batch_size=size, shuffle=True, collate_fn=default_data_collator)

    def train_epoch() -> None:
        for batch in loader:
            model(**batch).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    _looped(train_epoch, turn)


def _module() -> tuple[Any, Any]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp()

        def training_step(self, batch: Any) -> Tensor:
            loss = functional.mse_loss(self.net(batch[0]), batch[0])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    return Module, DataLoader(TensorDataset(_points()), batch_size=32, shuffle=True)


def _lightning_plain(folder: Path) -> Epoch:
    import lightning

    class Turns(lightning.Callback):
        def __init__(self, pause: Epoch) -> None:
            self.pause = pause

        def on_train_epoch_end(self, *_: Any) -> None:
            self.pause()

    module, loader = _module()
    how: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False}
    how |= {"enable_model_summary": False, "default_root_dir": folder}

    def fit(pause: Epoch) -> None:
        trainer = lightning.Trainer(max_epochs=EPOCHS + 1, callbacks=[Turns(pause)], **how)
        trainer.fit(module(), loader)

    return _by_epoch(fit)


def _lightning_ours(folder: Path, turn: Epoch) -> None:
    import samestep.lightning

    module, loader = _module()
    recipe = samestep.lightning.recipe(module, {"train": loader}, batch_size=32)
    _recipe(recipe, folder, turn)


def _lightning_looped(_: Path, turn: Epoch) -> None:
    module, loader = _module()
    net = module().net
    optimizer = torch.optim.Adam(net.parameters())

    def train_epoch() -> None:
        for (x,) in loader:
            optimizer.zero_grad()
            functional.mse_loss(net(x), x).backward()
            optimizer.step()

    _looped(train_epoch, turn)


TRAININGS = {
    "dlinear-short": _windows(341),
    "dlinear-341": _windows(341, 100),
    "dlinear": _windows(2560),
    "spiral": _spiral("spiral_slicing", "spiral: slices, fused Adam", 0.95),
    "spiral-compiled": _spiral(
        "spiral_compiled", "spiral: 8 steps compiled by hand, --compile on", 0.95, compile="on"
    ),
    "dino": Training("own loop: DINO, a small MLP", _dino_plain, _dino_ours, 0.97),
    "grpo": Training("own loop: GRPO, a checkpoint every 5 steps", _grpo_plain, _grpo_ours, 0.9),
    "grpo-synced": Training(
        "the same, of a loop that syncs and hashes its checkpoints",
        partial(_grpo_plain, save=_save_for_good),
        _grpo_ours,
        0.9,
    ),
    "forward-forward": Training("own loop: forward-forward", _forward_plain, _forward_ours, 0.9),
    "ctc": Training("recipe: an LSTM with CTC, padded, 60 epochs", _ctc_plain, _ctc_ours, 1.0, 60),
    "gpt": Training("recipe: a GPT, Muon and AdamW, 60 epochs", _gpt_plain, _gpt_ours, 1.0, 60),
    "trainer": Training("Hugging Face's Trainer, brought", _trainer_plain, _trainer_ours, 1.3),
    "trainer-looped": Training("the same, by a plain loop", _trainer_plain, _trainer_looped, None),
    "lightning": Training("Lightning's Trainer, brought", _lightning_plain, _lightning_ours, 2.0),
    "lightning-looped": Training(
        "the same, by a plain loop", _lightning_plain, _lightning_looped, None
    ),
}


if __name__ == "__main__":
    raise SystemExit(main())
