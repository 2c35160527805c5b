"""Say what each part of the GPU's benchmark compares: tables, profiles, targets, and their data.

{data} holds mnist/ and cifar10/. `dry` makes everything tiny, for a CPU.
"""

from dataclasses import dataclass
from pathlib import Path

from measure import (
    Measure,
    blocked_seconds,
    equal,
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
ACCURACY, AIM_S = 0.94, 10.0
SEEDS = (42, 43, 44)
IDLE_LIMIT = 0.05
NO_CIFAR10 = "accuracy takes CIFAR-10 itself: name its folder with --data-dir DIR"

_SMALL = ("--batch-size", "32", "--lr", "0.001")
_MNIST = ("--data-dir", "{data}/mnist")
_CIFAR10 = ("--data-dir", "{data}/cifar10")


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one call measures, in at most 150 s."""

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
    parts = (
        *(_spiral(dry=dry), _mnist(dry=dry), _resnet(dry=dry), _resnet_compiled(dry=dry)),
        *(_time_to_94(dry=dry), _startup(dry=dry), _bits(dry=dry), _determinism(dry=dry)),
        _async_checkpoint(dry=dry),
    )
    return {part.name: part for part in parts}


def _samestep(name: str, verb: str, words: tuple[str, ...], measure: Measure) -> Row:
    # The hand-written loops let cuDNN choose its kernels, too; equal bits do not go with that.
    chooses = () if {"--deterministic", "--virtual-ranks"} & {*words} else ("--cudnn-benchmark",)
    command = (PYTHON, "-m", "samestep", verb, *words, "--run-dir", "{run}", *chooses)
    return Row(name=name, command=command, measure=measure)


def _trained(name: str, epochs: int, *words: str) -> Row:
    # The first epoch warms up, as in every peer; what lies between epochs is not timed. Losses are
    # logged as often as Lightning logs them: so short a run would log every step.
    length = ("--epochs", str(epochs + 1), "--log-every", "50")
    rarely = ("--eval-every-epochs", "10000", "--checkpoint-every-epochs", "10000")
    return _samestep(name, "train", (*words, *length, *rarely), fastest(samestep_throughput))


def _profile(name: str, *words: str, dry: bool) -> Row:
    extent = ("--steps", "4") if dry else ("--seconds", "2")
    return _samestep(name, "profile", (*words, *extent, "--json"), profiled)


def _peer(name: str, script: str, epochs: int, *words: str, needs: str = "") -> Row:
    command = (PYTHON, str(PEERS / f"{script}.py"), "--epochs", str(epochs), *words)
    return Row(name=name, command=command, measure=fastest(peer_throughput), needs=needs)


def _spiral(*, dry: bool) -> Part:
    spiral = ("spiral", *_SMALL, "--dropout", "0.1")
    title = "Spiral: 7,000 training samples, MLP 2-64-32-16-2, batch 32, Adam"
    table = _small_table("spiral", title, 1 if dry else 20, spiral, ())
    profiles = (_profile("spiral, compile on", *spiral, "--compile", "on", dry=dry),)
    return Part(name="spiral", tables=(table,), profiles=profiles[: 0 if dry else None])


def _mnist(*, dry: bool) -> Part:
    mnist = ("mnist", *_SMALL, *_MNIST, "--model", "simple")
    title = "MNIST's shape: SimpleModel 784-128-10, batch 32, Adam"
    table = _small_table("mnist", title, 1 if dry else 4, mnist, _MNIST)
    profiles = (_profile("mnist, eager", *mnist, dry=dry),)
    return Part(name="mnist", tables=(table,), profiles=profiles[: 0 if dry else None])


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
            Target(row="samestep, eager", against=plain, limit=1.5),
            Target(row=on, against=plain, limit=8.0),
            Target(row=on, against=graph, limit=0.9),
        ),
    )


def _of_resnet(*, dry: bool) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Return the epochs, and what the peers and samestep are called with."""
    epochs, batch = (1, 16) if dry else (4, 512)
    size = ("--batch-size", str(batch), *(("--width", "2") if dry else ()))
    mine = (
        *("cifar10", *size, *_CIFAR10, "--lr", "0.05", "--warmup-steps", "0"),
        *("--precision", "bf16", "--channels-last", "--drop-last"),
    )
    return epochs, (*size, *_CIFAR10), mine


_RESNET = "CIFAR-10's shape: ResNet-18, batch 512, bf16, channels last, crop and flip"
_NO_REST = ("Each row leaves out the incomplete last batch of an epoch.",)


def _resnet(*, dry: bool) -> Part:
    epochs, words, mine = _of_resnet(dry=dry)
    hand, lightning = "hand-written, images on the GPU", "Lightning, images on the GPU"
    table = Table(
        name="resnet",
        title=_RESNET,
        unit="samples/s",
        baseline=(hand,),
        rows=(
            _peer(hand, "gpu_resnet", epochs, *words),
            _trained("samestep", epochs, *mine),
            _peer(lightning, "gpu_lightning", epochs, *words, needs="lightning"),
        ),
        targets=(
            Target(row="samestep", against=hand, limit=1.0),
            Target(row="samestep", against=lightning, limit=1.05),
        ),
        notes=_NO_REST,
    )
    profiles = (_profile("ResNet-18, eager", *mine, dry=dry),)
    idle = tuple(row.name for row in profiles)
    return Part(name="resnet", tables=(table,), profiles=profiles, idle=idle)


def _resnet_compiled(*, dry: bool) -> Part:
    epochs, words, mine = _of_resnet(dry=dry)
    compiled, on = "hand-written, model compiled", "samestep, compile on"
    table = Table(
        name="resnet-compiled",
        title=f"{_RESNET}, compiled",
        unit="samples/s",
        baseline=(compiled,),
        rows=(
            _peer(compiled, "gpu_resnet", epochs, *words, "--compile"),
            _trained(on, epochs, *mine, "--compile", "on"),
        ),
        targets=(Target(row=on, against=compiled, limit=1.0),),
        notes=_NO_REST,
    )
    profiles = (
        () if dry else (_profile("ResNet-18, compile on", *mine, "--compile", "on", dry=dry),)
    )
    idle = tuple(row.name for row in profiles)
    return Part(name="resnet-compiled", tables=(table,), profiles=profiles, idle=idle, rounds=1)


def _bits(*, dry: bool) -> Part:
    cases = ("convnet-fp32", "convnet-bf16", "resnet-fp32", "resnet-bf16", "gpt-fp32", "gpt-bf16")
    resumed = ("resumed", "resumed-compiled")
    script = (PYTHON, str(PEERS.parent / "gpu_bits.py"))
    dried = ("--dry",) if dry else ()
    table = Table(
        name="bits",
        title="Equal to the last bit: seconds of both trainings; one that differs has failed",
        unit="s",
        baseline=(),
        rows=tuple(
            Row(name=case, command=(*script, case, "--data-dir", "{data}", *dried), measure=equal)
            for case in (resumed[:1] if dry else (*cases, *resumed))
        ),
        targets=(),
        notes=(
            "NAME-PRECISION: 4 virtual ranks on one rank and on two that share the GPU.",
            "resumed: killed and resumed, against uninterrupted, both with --deterministic.",
        ),
    )
    return Part(name="bits", tables=(table,), rounds=1)


def _determinism(*, dry: bool) -> Part:
    epochs, _, mine = _of_resnet(dry=dry)
    plain = "samestep"
    table = Table(
        name="determinism",
        title=f"{_RESNET}: what equal bits cost",
        unit="samples/s",
        baseline=(plain,),
        rows=(
            _trained(plain, epochs, *mine),
            _trained("--deterministic", epochs, *mine, "--deterministic"),
            _trained("--virtual-ranks 4", epochs, *mine, "--virtual-ranks", "4"),
        ),
        targets=(Target(row="--deterministic", against=plain, limit=0.85),),
    )
    return Part(name="determinism", tables=(table,))


def _async_checkpoint(*, dry: bool) -> Part:
    script = (PYTHON, str(PEERS.parent / "checkpoints.py"), "--mib", "8" if dry else "1024")
    words = (*script, "--rounds", "3", "--device", "cpu" if dry else "cuda", "--way")
    plain, mine = "torch.save + fsync", "samestep"
    names = (plain, mine, "Lightning, AsyncCheckpointIO", "DCP, async_save")
    table = Table(
        name="async-checkpoint",
        title="A checkpoint of 1 GiB from the GPU: seconds that training waits",
        unit="s",
        baseline=(plain,),
        rows=tuple(
            Row(name=name, command=(*words, name), measure=blocked_seconds, needs="lightning")
            for name in names[: 2 if dry else None]
        ),
        targets=(Target(row=mine, against=plain, limit=0.1, kind="at most"),),
    )
    return Part(name="async-checkpoint", tables=(table,), rounds=1)


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
            Row(name=script, command=(PYTHON, str(PEERS / "startup.py")), measure=seconds_to_line),
            _samestep(mine, "train", short, samestep_seconds_to_step),
        ),
        targets=(Target(row=mine, limit=1.15, kind="at most"),),
    )
    return Part(name="startup", tables=(table,))
