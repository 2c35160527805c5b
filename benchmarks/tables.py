"""Say what is compared with what: the rows of each table, their baseline and their targets.

Commands hold placeholders that the runner fills: {data} directory of the data files, {run} a fresh
run directory, {workers} the best number of DataLoader workers of the first round.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from measure import (
    Measure,
    cpu_seconds,
    fastest,
    imports_of,
    peer_throughput,
    samestep_seconds_to_step,
    samestep_throughput,
    seconds_to_exit,
    seconds_to_line,
    tracked_seconds_to_step,
)

PEERS = Path(__file__).parent / "peers"
EXAMPLES = Path(__file__).parent.parent / "examples"
_GPT = str(EXAMPLES / "char_gpt.py")
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SAMESTEP = (PYTHON, "-m", "samestep", "train")
LIGHTNING = ("--engine", "lightning")
ALIKE = ("--run-dir", "{run}", "--seed", "42", "--device", "cpu", "--threads", "1")
SCRIPT = str(Path(PYTHON).parent / "samestep")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One competitor: a process of its own, and how to read it."""

    name: str
    command: tuple[str, ...]
    measure: Measure
    loader: bool = False
    """Whether it is one of the DataLoaders of which the best number of workers is sought."""
    needs: str = ""
    """A package that it imports and that a machine may lack."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a row must reach, as a ratio to (or a difference in seconds from) another row."""

    row: str
    against: str | None = None
    """The other row; None for the table's baseline."""
    limit: float
    kind: Literal["at least", "at most", "at most more"] = "at least"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One comparison."""

    name: str
    title: str
    unit: Literal["samples/s", "s"]
    rows: tuple[Row, ...]
    baseline: tuple[str, ...]
    """The row that is 1.0; of several, the one with the best median."""
    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()
    rounds_factor: int = 1
    """Short measurements take this many times the rounds asked for, and one more to warm up."""
    data: Literal["none", "whole", "part", "cifar10", "jpegs"] = "none"
    facts: Callable[[], list[str]] = list
    """Sentences to add that are found out by running something untimed."""


def _peer(name: str, script: str, epochs: int, *arguments: str, loader: bool = False) -> Row:
    launcher = TORCHRUN if script in ("ddp_plain", "ddp_accelerate", "gpt_ddp") else (PYTHON,)
    command = (*launcher, str(PEERS / f"{script}.py"), "--epochs", str(epochs), *arguments)
    return Row(name=name, command=command, measure=peer_throughput, loader=loader)


def _samestep(name: str, recipe: str, epochs: int, *arguments: str) -> Row:
    command = (*SAMESTEP, recipe, *ALIKE, "--epochs", str(epochs + 1), *arguments)
    return Row(name=name, command=command, measure=samestep_throughput)


def all_tables(*, quick: bool) -> tuple[Table, ...]:
    """Build every table; quick ones put fewer epochs on the clock."""
    return (
        _spiral(3 if quick else 20),
        _mnist(1 if quick else 3),
        _ddp(1),
        _cifar10(),
        _jpegs(1 if quick else 3),
        _graphs(1),
        _gpt(1 if quick else 4),
        _fsdp(1 if quick else 3),
        _startup(),
        *_trackers(),
        _help(),
    )


def _spiral(epochs: int) -> Table:
    mine = ("--batch-size", "32", "--dropout", "0.1")
    return Table(
        name="spiral",
        title="Spiral: 7,000 training samples, MLP 2-64-32-16-2, batch 32, Adam",
        unit="samples/s",
        baseline=("plain PyTorch, DataLoader",),
        rows=(
            _peer("plain PyTorch, DataLoader", "spiral_plain", epochs),
            _peer("Accelerate", "spiral_accelerate", epochs),
            _peer("Lightning, no logging", "spiral_lightning", epochs),
            _peer("Lightning, default", "spiral_lightning_default", epochs),
            _peer("tensor slicing, fused Adam", "spiral_slicing", epochs),
            _peer("hand-written compile of 8 steps", "spiral_compiled", epochs),
            _samestep("samestep", "spiral", epochs, *mine),
            _samestep("samestep, compile on", "spiral", epochs, *mine, "--compile", "on"),
            _samestep("samestep, engine lightning", "spiral", epochs, *mine, *LIGHTNING),
        ),
        targets=(
            Target(row="samestep", against="tensor slicing, fused Adam", limit=0.9),
            Target(row="samestep", limit=1.5),
            Target(row="samestep, compile on", limit=6.0),
            Target(row="samestep, engine lightning", against="Lightning, no logging", limit=0.9),
        ),
    )


def _mnist(epochs: int) -> Table:
    data = ("--data-dir", "{data}")
    chosen = (*data, "--workers", "{workers}")
    mine = (*data, "--model", "simple", "--batch-size", "32")
    loaders = {workers: f"DataLoader, {workers} workers" for workers in (0, 1, 2, 4)}
    return Table(
        name="mnist",
        title="Fashion-MNIST: 60,000 IDX images, SimpleModel 784-128-10, batch 32, Adam",
        unit="samples/s",
        data="whole",
        baseline=tuple(loaders.values()),
        rows=(
            *(
                _peer(name, "mnist_plain", 1, *data, "--workers", str(workers), loader=True)
                for workers, name in loaders.items()
            ),
            _peer("DataLoader, leanest transform", "mnist_lean", 1, *chosen),
            _peer("Lightning, no logging", "mnist_lightning", 1, *chosen),
            _peer("Accelerate", "mnist_accelerate", 1, *chosen),
            _peer("DataLoader, `__getitems__`", "mnist_getitems", epochs, *data),
            _peer("resident tensor, fused Adam", "mnist_resident", epochs, *data),
            _samestep("samestep", "mnist", epochs, *mine),
            _samestep("samestep, compile on", "mnist", epochs, *mine, "--compile", "on"),
        ),
        targets=(
            Target(row="samestep", limit=5.0),
            Target(row="samestep", against="resident tensor, fused Adam", limit=0.9),
            Target(row="samestep, compile on", against="samestep", limit=1.0),
        ),
        notes=(
            (
                "DataLoader, Lightning and Accelerate read one sample at a time through PIL and "
                "torchvision's ToTensor and Normalize. The leanest transform is the same work in "
                "the fewest tensor operations, written by hand. It, Lightning and Accelerate use "
                "the best number of workers of the first round."
            ),
        ),
    )


def _ddp(epochs: int) -> Table:
    data = ("--data-dir", "{data}")
    mine = (*data, "--model", "convnet", "--batch-size", "128", "--nproc", "2")
    return Table(
        name="ddp",
        title="Two ranks, Gloo: Fashion-MNIST, ConvNet, batch 64 per rank, Adam",
        unit="samples/s",
        data="part",
        baseline=("hand-written DDP",),
        rows=(
            _peer("hand-written DDP", "ddp_plain", epochs, *data),
            _peer("Lightning DDP", "ddp_lightning", epochs, *data),
            _peer("Accelerate DDP", "ddp_accelerate", epochs, *data),
            _samestep("samestep --nproc 2", "mnist", epochs, *mine),
        ),
        targets=(Target(row="samestep --nproc 2", limit=1.0),),
        notes=("An epoch is the first 7,680 images, so that a round stays short.",),
    )


def _cifar10() -> Table:
    data = ("--data-dir", "{data}")
    mine = (*data, "--batch-size", "64", "--lr", "0.05")
    return Table(
        name="cifar10",
        title="CIFAR-10's shape, ResNet-18, batch 64, SGD, crop and flip, channels last",
        unit="samples/s",
        data="cifar10",
        baseline=("hand-written, images in memory",),
        rows=(
            _peer("hand-written, images in memory", "cifar10_resident", 1, *data),
            _peer("Lightning, no logging", "cifar10_lightning", 1, *data),
            _samestep("samestep", "cifar10", 1, *mine),
            _samestep("samestep, engine lightning", "cifar10", 1, *mine, *LIGHTNING),
        ),
        targets=(
            Target(row="samestep", limit=1.0),
            Target(row="samestep", against="Lightning, no logging", limit=1.0),
        ),
        notes=("The images are random bytes: 576 of them train, which is enough to time steps.",),
    )


def _jpegs(epochs: int) -> Table:
    data = ("--data-dir", "{data}")
    plain = {workers: f"DataLoader, {workers} workers" for workers in (0, 1, 2, 4)}
    mine = {workers: f"samestep, {workers} workers" for workers in plain}
    memory = (*data, "--memory")
    return Table(
        name="images",
        title="Images: 10,000 JPEGs of 32 x 32, read in batches of 128, cropped and flipped",
        unit="samples/s",
        data="jpegs",
        baseline=tuple(plain.values()),
        rows=(
            *(
                _peer(name, script, 1, *data, "--workers", str(workers))
                for workers in plain
                for name, script in (
                    (plain[workers], "jpegs_plain"),
                    (mine[workers], "jpegs_samestep"),
                )
            ),
            _peer("samestep, in memory, first epoch", "jpegs_samestep", 1, *memory, "--first"),
            _peer("samestep, in memory, later epochs", "jpegs_samestep", epochs, *memory),
        ),
        targets=(
            *(Target(row=mine[n], against=plain[n], limit=1.0) for n in plain),
            Target(
                row="samestep, in memory, later epochs",
                against="samestep, in memory, first epoch",
                limit=5.0,
            ),
        ),
        notes=(
            (
                "No model is trained: batches as the model would get them are all that is timed. "
                "The first epoch in memory includes the decoding of every file that fills it."
            ),
        ),
    )


def _graphs(epochs: int) -> Table:
    return Table(
        name="graphs",
        title="200,000 graphs of 4 to 12 nodes, collated by PyG in batches of 128, 2 workers",
        unit="samples/s",
        baseline=("PyG's DataLoader",),
        rows=(
            _peer("PyG's DataLoader", "graphs_pyg", epochs, "--workers", "2"),
            _peer("samestep", "graphs_samestep", epochs, "--workers", "2"),
        ),
        targets=(Target(row="samestep", limit=0.98),),
        notes=(
            "No model is trained: batches as the model would get them are all that is timed.",
            "An epoch is the first 200 batches of a new order of all graphs.",
        ),
    )


def _gpt(epochs: int) -> Table:
    return _two_ranks(
        "gpt",
        "examples/char_gpt.py, batch 16 per rank, AdamW, clipped",
        _peer("hand-written DDP", "gpt_ddp", epochs),
        _samestep("samestep --nproc 2", _GPT, epochs, "--nproc", "2"),
        limit=0.98,
    )


def _fsdp(epochs: int) -> Table:
    size = ("--nproc", "2", "--strategy", "fsdp", "--dim", "256")
    return _two_ranks(
        "fsdp",
        "examples/char_gpt.py with --dim 256, each block sharded by FSDP2",
        _peer("hand-written fully_shard", "gpt_ddp", epochs, "--fsdp", "--width", "256"),
        _samestep("samestep --strategy fsdp", _GPT, epochs, *size),
        limit=0.97,
    )


def _two_ranks(name: str, title: str, peer: Row, mine: Row, *, limit: float) -> Table:
    return Table(
        name=name,
        title=f"Two ranks, Gloo: {title}",
        unit="samples/s",
        baseline=(peer.name,),
        rows=tuple(replace(row, measure=fastest(row.measure)) for row in (peer, mine)),
        targets=(Target(row=mine.name, limit=limit),),
        notes=("In this table throughput is that of the fastest epoch, for both rows.",),
    )


def _startup() -> Table:
    arguments = ("--max-steps", "1", "--log-every", "1")
    return Table(
        name="startup",
        title="Start-up: from process start to the first completed step",
        unit="s",
        rounds_factor=2,
        baseline=("40-line script",),
        rows=(
            Row(
                name="40-line script",
                command=(PYTHON, str(PEERS / "startup.py")),
                measure=seconds_to_line,
            ),
            Row(
                name="samestep train spiral",
                command=(*SAMESTEP, "spiral", *ALIKE, *arguments),
                measure=samestep_seconds_to_step,
            ),
        ),
        targets=(Target(row="samestep train spiral", limit=1.15, kind="at most"),),
        notes=(
            (
                "The script imports torch and rich, builds the same data, model and Adam, "
                "takes a step and prints; samestep's step is seen in its events.jsonl."
            ),
        ),
    )


def _trackers() -> tuple[Table, Table]:
    """Return what trackers cost: until the first step, and in all."""
    short = (*SAMESTEP, "spiral", *ALIKE, "--max-steps", "1", "--log-every", "1")
    names = ("tensorboard", "comet", "wandb", "mlflow")
    commands = {
        "no tracker": short,
        **{name: (*short, "--track-offline", "--track", name) for name in names},
        "all four": (*short, "--track-offline", "--track", ",".join(names)),
    }
    note = "Offline: the services are not reached from here. A tracker imports beside the training."

    def table(name: str, title: str, measure: Measure) -> Table:
        rows = tuple(Row(name=n, command=c, measure=measure) for n, c in commands.items())
        return Table(
            name=name,
            title=title,
            unit="s",
            rounds_factor=2,
            baseline=("no tracker",),
            rows=rows,
            targets=(),
            notes=(note,),
        )

    start = "Trackers: from process start to the first completed step"
    cpu = "Trackers: CPU seconds of a whole command that trains one step, trackers included"
    return (
        table("trackers", start, tracked_seconds_to_step),
        table("trackers-cpu", cpu, cpu_seconds),
    )


def _help() -> Table:
    return Table(
        name="help",
        title="`samestep --help`",
        unit="s",
        rounds_factor=4,
        baseline=("python -c pass",),
        rows=(
            Row(name="python -c pass", command=(PYTHON, "-c", "pass"), measure=seconds_to_exit),
            Row(name="samestep --help", command=(SCRIPT, "--help"), measure=seconds_to_exit),
        ),
        targets=(Target(row="samestep --help", limit=0.3, kind="at most more"),),
        facts=_torch_on_help,
    )


def _torch_on_help() -> list[str]:
    if not Path(SCRIPT).exists():
        return []
    verb = (
        "imports torch: NOT as promised"
        if imports_of("torch", [SCRIPT, "--help"])
        else ("does not import torch")
    )
    return [f"`samestep --help` {verb}."]
