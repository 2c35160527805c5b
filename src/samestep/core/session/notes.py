"""What a user should know of a run that is about to start, a sentence each."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from torch import nn

from samestep.base.errors import listed
from samestep.base.run.records import read_records
from samestep.base.settings import Settings
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.recipe_data import Unpacked
from samestep.core.learner.agreement import arithmetic
from samestep.core.learner.model_state import hooked_parameters
from samestep.core.learner.optimizer_state import kind_of
from samestep.core.learner.side_effects import batch_norms
from samestep.core.plan import Plan, warmup_steps
from samestep.core.session.build import Built
from samestep.core.session.request import Request
from samestep.core.session.session import room_notes, state_bytes
from samestep.core.training.work import Work, is_done

_FEW = 8
"""Samples per rank and step below which a note tells how to have more."""


def notes_of(request: Request, built: Built, path: Path, *, resumed: bool) -> list[str]:
    """Return the notes of a run that is about to start."""
    notes = []
    work, settings, plan = built.work, built.work.settings, built.work.plan
    if request.settings_of is not None:
        notes.append(
            f"This is a new run with the settings of {request.settings_of}. To continue that "
            f"run: samestep train {request.settings_of} --resume."
        )
    notes += [] if built.initial is None else [built.initial.note()]
    by_virtual = "--virtual-ranks N makes it the same on any number of ranks."
    sharded = work.learner.sharded
    by_virtual = f"With --strategy ddp, {by_virtual}" if sharded else by_virtual
    notes += [*built.unkept.notes(by_virtual), *_without_effect(work)]
    notes += _by_call(built.unkept.by_call, plan)
    if not sharded and (hooked := [*hooked_parameters(work.learner.model)]):
        notes.append(
            f"Hooks of {listed(hooked)} get each rank's own gradient: unless they multiply it by "
            "fixed numbers, as a mask does, training differs with the number of ranks."
        )
    of_loss = [*getattr(request.recipe.loss, "named_parameters", dict)()]
    if untrained := [name for name, parameter in of_loss if parameter.requires_grad]:
        notes.append(f"The loss's {listed(untrained)} is not trained, only the model is.")
    if work.world.elastic and (asked := asks_for_ranks(request.recipe.data)):
        notes.append(
            f"data() asks for {asked}, which change when a rank dies or joins (--elastic). Each "
            "rank calls it once: let it return all samples; samestep divides them among the ranks."
        )
    if isinstance(train := built.splits.train, Unpacked):
        notes += train.notes(settings)
    notes += _other_bits(work, path) if resumed else []
    notes += plan_notes(plan, settings)
    if settings.keep_top_k and work.validation is None:
        notes.append("--keep-top-k keeps only the last checkpoint: there is no validation data.")
    watched = built.splits.plain_name(built.state.watch.metric)
    rises = getattr(request.recipe.metrics.get(watched), "higher_is_better", watched == "accuracy")
    directed = rises or built.state.watch.mode == "min"
    if settings.monitor and settings.mode == "auto" and not directed:
        notes.append(
            f"--monitor {watched}: the highest {watched} counts as the best. If less is better, "
            f'write lower_is_better=("{watched}",) into the recipe, or add --mode min.'
        )
    if request.recipe_changes:
        changes = listed(request.recipe_changes, 5)
        notes.append(f"The run continues with the recipe as it is now. Changed: {changes}.")
    notes += _own_code(request, path, resumed=resumed) if request.source.endswith(".py") else []
    average = work.learner.average
    extra = () if average is None else average.state().values()
    held = state_bytes([work.learner.model], [work.learner.optimizer], extra)
    notes += room_notes(path, held)
    if resumed and is_done(work, built.state):
        notes.append("The run is finished. To train further, set a larger --epochs or --max-steps.")
    return notes


def _by_call(buffers: tuple[str, ...], plan: Plan) -> list[str]:
    """Return a note on what depends on the number of micro-steps."""
    note = (
        f"Each forward changes the model's buffer {listed(buffers, 3)}, and a step runs "
        f"{plan.accumulate} micro-steps on this many ranks. Where another number of ranks needs "
        "another number of micro-steps, training differs. --micro-batch-size "
        f"{plan.global_batch_size} takes each step in one on any number of ranks."
    )
    return [note] if buffers and plan.accumulate > 1 and plan.virtual_ranks is None else []


def _own_code(request: Request, path: Path, *, resumed: bool) -> list[str]:
    """Return notes on a recipe's file: whether it has changed, and what the run has not kept."""
    from samestep.base.run.user_modules import modules_note  # noqa: PLC0415 - of users' files only
    from samestep.core.session.recipe_changes import recipe_changes  # noqa: PLC0415

    compares = resumed and not request.recipe_changes
    changes = listed(recipe_changes(path, request.source), 5) if compares else ""
    changed = f"{request.source} has changed ({changes}); the run continues with its own copy."
    return [*([changed] if changes else []), *modules_note(path)]


_OF_RANKS = ("get_rank", "get_world_size", "current_world", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def asks_for_ranks(function: Callable[..., Any]) -> str:
    """Return the names for ranks or world size in a function's code, and its place; "" if none."""
    codes = [getattr(inspect.unwrap(function), "__code__", None)]
    for code in filter(None, codes):
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        if named := [n for n in _OF_RANKS if n in code.co_names or n in code.co_consts]:
            where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            return f"{listed(named, 3)} ({where})"
    return ""


def _without_effect(work: Work) -> list[str]:
    """Return notes on settings that have no effect here, and on parts that run a slower way."""
    settings, world = work.settings, work.world
    train, is_stream = work.train, work.train.is_stream
    never_saved = settings.checkpoint_every_steps is settings.checkpoint_every_minutes is None
    alone = world.world_size == 1
    modules = batch_norms(work.learner.model.train())  # one may be kept in eval mode
    norms = [
        repr(n) for n, m in modules.items() if m.training and not isinstance(m, nn.SyncBatchNorm)
    ]
    over_all_ranks = (
        "--sync-batchnorm normalises over those of all ranks."
        if world.device.type == "cuda"
        else "--virtual-ranks N makes it the same on any number of ranks."
    )
    notes = {
        "--newton-schulz has no effect: no optimizer is torch.optim.Muon.": (
            settings.newton_schulz != "bf16" and "Muon" not in kind_of(work.learner.optimizer)
        ),
        "--num-workers has no effect: the data is held in memory.": (
            settings.num_workers and isinstance(train, MemorySource)
        ),
        "The training data stays in CPU memory, since it would take more than a quarter of the "
        "GPU's. Its batches are copied while the GPU computes.": (
            isinstance(train, MemorySource) and not train.is_resident
        ),
        "--shuffle-buffer has no effect: the data is not a stream, and is shuffled as a whole.": (
            settings.shuffle_buffer and not is_stream
        ),
        "The stream's state_dict does not restore its position, or cannot be saved: a resumed run "
        "reads the earlier elements again, and skips them.": (
            getattr(train, "loses_its_place", False)
        ),
        "With --max-steps and no epochs, a stream that does not end is saved and evaluated only "
        "after the last step. --checkpoint-every-steps and --eval-every-steps do it before.": (
            work.plan.is_stream and not work.plan.epochs and never_saved
        ),
        "No pictures are drawn of a sharded model (--strategy fsdp).": (
            settings.pictures and settings.strategy == "fsdp" and world.connected
        ),
        f"The model has BatchNorm ({listed(norms, 1)}), which normalises over the samples of each "
        f"rank by itself: this is a different training from that on one rank. {over_all_ranks}": (
            norms and not (alone or settings.sync_batchnorm or settings.virtual_ranks)
        ),
        "--sync-batchnorm has no effect on one rank: it sees the whole batch.": (
            settings.sync_batchnorm and alone
        ),
        "--strategy fsdp has no effect on one rank: it holds the whole model.": (
            settings.strategy == "fsdp" and alone and not world.connected
        ),
        "--bucket-cap-mb has no effect on one rank: nothing is reduced.": (
            settings.bucket_cap_mb is not None and alone and not world.connected
        ),
        "--warmup-from has no effect without --warmup-steps.": (
            settings.warmup_from is not None and not settings.warmup_steps
        ),
        "--cudnn-benchmark has no effect: only NVIDIA GPUs use cuDNN.": (
            settings.cudnn_benchmark and world.device.type != "cuda"
        ),
    }
    return [note for note, applies in notes.items() if applies]


def plan_notes(plan: Plan, settings: Settings) -> list[str]:
    """Return notes on odd shares of a step, or a warm-up that outlasts the run."""
    notes = []
    parts = plan.virtual_ranks or plan.world_size
    if warmup_steps(plan, settings) >= plan.total_steps:
        outlasts = f"outlasts the run of {plan.total_steps} steps"
        rate = f"the learning rate never reaches {plan.lr:g}."
        notes.append(f"--warmup-steps {settings.warmup_steps} {outlasts}: {rate}")
    if 0 < plan.num_samples < plan.global_batch_size:
        notes.append(
            f"The global batch of {plan.global_batch_size:,} is larger than the "
            f"{plan.num_samples:,} training samples: every step takes all, an epoch is one step."
        )
    if plan.by_tokens is not None and (short := sum(n < parts for n in plan.by_tokens.sizes)):
        ranks = "virtual ranks" if plan.virtual_ranks else "ranks"
        notes.append(
            f"--batch-tokens {settings.batch_tokens}: {short:,} of {plan.steps_per_epoch:,} "
            f"batches have fewer samples than the {parts} {ranks}, some of which then wait. Use "
            "more tokens per step or fewer ranks; the result is the same."
        )
    few = plan.global_batch_size < _FEW * plan.world_size
    if plan.world_size > 1 and few and settings.batch_size_per_rank is None:
        notes.append(
            f"The {plan.world_size} ranks share {plan.global_batch_size} samples per step. With so "
            "few per rank, more ranks are seldom faster. With --batch-size-per-rank N the batch "
            "grows with the ranks, which is a different training."
        )
    if settings.accumulate not in (None, plan.accumulate):
        notes.append(
            f"--accumulate {settings.accumulate}: a rank's samples make {plan.accumulate} "
            f"micro-steps of at most {plan.micro_batch_size}."
        )
    return notes


def _other_bits(work: Work, path: Path) -> list[str]:
    """Return a note if a run with virtual ranks continues where arithmetic rounds differently."""
    if not (work.world.virtual_ranks and work.world.is_main):
        return []
    starts = [r["arithmetic"] for r in read_records(path) if "arithmetic" in r]
    now = arithmetic(work.world.device)
    if not starts or starts[-1] == now:
        return []
    before, after = (" on ".join(machine.values()) for machine in (starts[-1], now))
    was = f"The run was trained with PyTorch {before}; here it is {after}."
    return [f"{was} From here on it is the same training to rounding, not to the last bit."]
