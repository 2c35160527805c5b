"""Say what each part of the GPU's benchmark compares: tables, profiles, targets, and their data.

{data} holds mnist/ and cifar10/. `dry` makes everything tiny, for a CPU.
"""

from dataclasses import dataclass
from pathlib import Path

from measure import (
    Measure,
    fastest,
    peer_throughput,
    profiled,
    samestep_seconds_to_step,
    samestep_throughput,
    seconds_to_accuracy,
    seconds_to_line,
)
from tables import PEERS, PYTHON, Row, Table, Target

SETTINGS_FILE = Path(__file__).parent.parent / "examples" / "cifar10_fast.toml"
ACCURACY, AIM_S = 0.94, 60.0
SEEDS = (42, 43, 44)
IDLE_LIMIT = 0.05
NO_CIFAR10 = "accuracy takes CIFAR-10 itself: name its folder with --data-dir DIR"

_SMALL = ("--batch-size", "32", "--lr", "0.001")
_MNIST = ("--data-dir", "{data}/mnist")
_CIFAR10 = ("--data-dir", "{data}/cifar10")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one call measures, in at most 8 minutes."""

    name: str
    tables: tuple[Table, ...] = ()
    profiles: tuple[Row, ...] = ()
    """Rows of `samestep profile`: the verdict and how much of a step the GPU idles."""
    idle: tuple[str, ...] = ()
    """The profiles whose GPU may idle for at most `IDLE_LIMIT` of a step."""
    rounds: int = 3
    needs_cifar10: bool = False
    """Whether images made of random bytes will not do."""


def all_parts(*, dry: bool) -> dict[str, Part]:
    """Return the parts by name, in the order of `all`."""
    parts = (_small(dry=dry), _resnet(dry=dry), _time_to_94(dry=dry), _startup(dry=dry))
    return {part.name: part for part in parts}


def _samestep(name: str, verb: str, words: tuple[str, ...], measure: Measure) -> Row:
    # The hand-written loops let cuDNN choose its kernels, too.
    alike = ("--run-dir", "{run}", "--cudnn-benchmark")
    return Row(name=name, command=(PYTHON, "-m", "samestep", verb, *words, *alike), measure=measure)


def _trained(name: str, epochs: int, *words: str) -> Row:
    # The first epoch warms up, as in every peer; what lies between epochs is not timed.
    length = ("--epochs", str(epochs + 1))
    rarely = ("--eval-every-epochs", "10000", "--checkpoint-every-epochs", "10000")
    return _samestep(name, "train", (*words, *length, *rarely), fastest(samestep_throughput))


def _profile(name: str, *words: str, dry: bool) -> Row:
    extent = ("--steps", "4") if dry else ("--seconds", "2")
    return _samestep(name, "profile", (*words, *extent, "--json"), profiled)


def _peer(name: str, script: str, epochs: int, *words: str, needs: str = "") -> Row:
    command = (PYTHON, str(PEERS / f"{script}.py"), "--epochs", str(epochs), *words)
    return Row(name=name, command=command, measure=fastest(peer_throughput), needs=needs)


def _small(*, dry: bool) -> Part:
    spiral = ("spiral", *_SMALL, "--dropout", "0.1")
    mnist = ("mnist", *_SMALL, *_MNIST, "--model", "simple")
    profiles = [
        _profile(f"{recipe[0]}, {name}", *recipe, *compiles, dry=dry)
        for recipe in (spiral, mnist)
        for name, compiles in (("compile on", ("--compile", "on")), ("eager", ()))
    ]
    return Part(
        name="small",
        tables=(
            _small_table(
                "small-spiral",
                "Spiral: 7,000 training samples, MLP 2-64-32-16-2, batch 32, Adam",
                1 if dry else 20,
                spiral,
                (),
            ),
            _small_table(
                "small-mnist",
                "MNIST's shape: SimpleModel 784-128-10, batch 32, Adam",
                1 if dry else 4,
                mnist,
                _MNIST,
            ),
        ),
        profiles=tuple(profiles[: 1 if dry else None]),
    )


def _small_table(
    name: str, title: str, epochs: int, mine: tuple[str, ...], data: tuple[str, ...]
) -> Table:
    plain, graph = "plain PyTorch, DataLoader", "hand-written CUDA graph of 8 steps"
    on = "samestep, compile on"
    return Table(
        name=name,
        title=title,
        unit="samples/s",
        baseline=(plain,),
        rows=(
            _peer(plain, "gpu_plain", epochs, *data),
            _peer(graph, "gpu_graph", epochs, *data),
            _trained("samestep, eager", epochs, *mine),
            _trained(on, epochs, *mine, "--compile", "on"),
        ),
        targets=(
            Target(row=on, against=plain, limit=8.0),
            Target(row=on, against=graph, limit=0.9),
        ),
    )


def _resnet(*, dry: bool) -> Part:
    epochs, batch, workers = (1, 16, 2) if dry else (4, 512, 16)
    size = ("--batch-size", str(batch), *(("--width", "2") if dry else ()))
    mine = (
        *("cifar10", *size, *_CIFAR10, "--lr", "0.05", "--warmup-steps", "0"),
        *("--precision", "bf16", "--channels-last", "--drop-last"),
    )
    on = ("--compile", "on")
    hand, compiled = "hand-written, images on the GPU", "hand-written, model compiled"
    loader, lightning = (
        f"torchvision, DataLoader, {workers} workers",
        "Lightning, images on the GPU",
    )
    words = (*size, *_CIFAR10)
    table = Table(
        name="resnet",
        title=f"CIFAR-10's shape: ResNet-18, batch {batch}, bf16, channels last, crop and flip",
        unit="samples/s",
        baseline=(hand,),
        rows=(
            _peer(hand, "gpu_resnet", epochs, *words),
            _trained("samestep", epochs, *mine),
            _peer(lightning, "gpu_lightning", epochs, *words, needs="lightning"),
            _peer(compiled, "gpu_resnet", epochs, *words, "--compile"),
            _trained("samestep, compile on", epochs, *mine, *on),
            _peer(
                loader, "gpu_torchvision", 1, *words, "--workers", str(workers), needs="torchvision"
            ),
        ),
        targets=(
            Target(row="samestep", against=hand, limit=1.0),
            Target(row="samestep, compile on", against=compiled, limit=1.0),
            Target(row="samestep", against=loader, limit=3.0),
            Target(row="samestep", against=lightning, limit=1.05),
        ),
        notes=("Each row leaves out the incomplete last batch of an epoch.",),
    )
    profiles = (
        _profile("ResNet-18, eager", *mine, dry=dry),
        _profile("ResNet-18, compile on", *mine, *on, dry=dry),
    )
    return Part(
        name="resnet",
        tables=(table,),
        profiles=profiles[: 1 if dry else None],
        idle=tuple(row.name for row in profiles),
    )


def _time_to_94(*, dry: bool) -> Part:
    tiny = ("--width", "2", "--batch-size", "16", "--epochs", "1", "--warmup-steps", "1") * dry
    mine = ("cifar10", "--config", str(SETTINGS_FILE), *_CIFAR10, *tiny)
    seeds = SEEDS[:1] if dry else SEEDS
    table = Table(
        name="time-to-94",
        title="CIFAR-10: seconds to 94 % test accuracy",
        unit="s",
        baseline=(),
        rows=tuple(
            _samestep(f"seed {seed}", "train", (*mine, "--seed", str(seed)), seconds_to_accuracy)
            for seed in seeds
        ),
        targets=(),
    )
    profile = () if dry else (_profile("examples/cifar10_fast.toml", *mine, dry=dry),)
    return Part(name="time-to-94", tables=(table,), profiles=profile, rounds=1, needs_cifar10=True)


def _startup(*, dry: bool) -> Part:
    short = ("spiral", "--max-steps", "1", "--log-every", "1")
    script, mine = "plain script", "samestep train spiral"
    table = Table(
        name="startup",
        title="Start-up: from process start to the first completed step",
        unit="s",
        rounds_factor=1 if dry else 2,
        baseline=(script,),
        rows=(
            Row(
                name=script,
                command=(PYTHON, str(PEERS / "startup.py")),
                measure=seconds_to_line,
                needs="tyro",
            ),
            _samestep(mine, "train", short, samestep_seconds_to_step),
        ),
        targets=(Target(row=mine, limit=1.15, kind="at most"),),
    )
    return Part(name="startup", tables=(table,))
