"""The notes that a run starts with: settings without effect, a changed recipe, other rounding."""

from pathlib import Path

from samestep.data.memory_source import MemorySource
from samestep.data.stream_source import StreamSource
from samestep.errors import listed
from samestep.run.records import read_records
from samestep.session.build import Built
from samestep.session.recipe_changes import recipe_changes
from samestep.session.request import Request
from samestep.training.alike import arithmetic
from samestep.training.plan import plan_notes
from samestep.training.work import Work, is_done


def notes_of(request: Request, built: Built, path: Path, *, resumed: bool) -> list[str]:
    """Return the notes of a run that is about to start."""
    notes = []
    work, settings, plan = built.work, built.work.settings, built.work.plan
    if request.settings_of is not None:
        notes.append(
            f"This is a new run with the settings of {request.settings_of}. To go on with that "
            f"run: samestep train {request.settings_of} --resume."
        )
    notes += _without_effect(work)
    notes += _other_bits(work, path) if resumed else []
    notes += plan_notes(plan, settings)
    if settings.keep_top_k and work.validation is None:
        notes.append("--keep-top-k keeps only the last checkpoint: there is no validation data.")
    watched = built.state.watch.metric
    rises = getattr(request.recipe.metrics.get(watched), "higher_is_better", watched == "accuracy")
    directed = rises or watched in request.recipe.falling()
    if settings.monitor and settings.mode == "auto" and not directed:
        notes.append(
            f"--monitor {watched}: the highest {watched} counts as the best. If less is better, "
            f'write lower_is_better=("{watched}",) into the recipe, or add --mode min.'
        )
    if request.recipe_changes:
        changes = listed(request.recipe_changes, 5)
        notes.append(f"The run goes on with the recipe as it is now; what has changed: {changes}.")
    elif resumed and (found := recipe_changes(path, request.source)):
        changes = listed(found, 5)
        notes.append(
            f"{request.source} has changed ({changes}); the run goes on with its own copy."
        )
    if resumed and is_done(work, built.state):
        notes.append("The run is finished; --epochs or --max-steps with a larger number goes on.")
    return notes


def _without_effect(work: Work) -> list[str]:
    """Return which settings have no effect here, and what takes a slower way."""
    settings, world = work.settings, work.world
    train, is_stream = work.train, isinstance(work.train, StreamSource)
    never_saved = settings.checkpoint_every_steps is settings.checkpoint_every_minutes is None
    alone = world.world_size == 1
    notes = {
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
        "The stream's state_dict does not lead back to the same element, or cannot be saved: a run "
        "that goes on will read the earlier elements again, and skip them.": (
            isinstance(train, StreamSource) and train.loses_its_place
        ),
        "With --max-steps and no epochs, a stream that does not end is saved and evaluated only "
        "after the last step. --checkpoint-every-steps and --eval-every-steps do it before.": (
            work.plan.is_stream and not work.plan.epochs and never_saved
        ),
        "--sync-batchnorm has no effect on one rank: it sees the whole batch.": (
            settings.sync_batchnorm and alone
        ),
        "--bucket-cap-mb has no effect on one rank: nothing is reduced.": (
            settings.bucket_cap_mb is not None and alone and not world.connected
        ),
        "--cudnn-benchmark has no effect: only NVIDIA GPUs use cuDNN.": (
            settings.cudnn_benchmark and world.device.type != "cuda"
        ),
    }
    return [note for note, applies in notes.items() if applies]


def _other_bits(work: Work, path: Path) -> list[str]:
    """Return a note if a run with virtual ranks goes on where arithmetic rounds differently."""
    if not (work.world.virtual_ranks and work.world.is_main):
        return []
    starts = [r["arithmetic"] for r in read_records(path) if "arithmetic" in r]
    now = arithmetic(work.world.device)
    if not starts or starts[-1] == now:
        return []
    before, after = (" on ".join(one.values()) for one in (starts[-1], now))
    was = f"The run was trained with PyTorch {before}; here it is {after}."
    return [f"{was} From here on it is the same training to rounding, not to the last bit."]
