"""What equal bits need beside the settings: the same PyTorch and the same model of device."""

from pathlib import Path

from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.run.records import read_records
from samestep.training.alike import arithmetic
from samestep.training.work import Work


def check_promise(world: World) -> None:
    """Check that all ranks of virtual ones round alike.

    Raises:
        UserError: on every rank, that they have different devices or versions of PyTorch.
    """
    if not world.virtual_ranks:
        return
    found = world.gather(arithmetic(world.device))
    for rank, other in enumerate(found):
        if other != found[0]:
            first, this = (", ".join(one.values()) for one in (found[0], other))
            raise UserError(
                f"--virtual-ranks: rank {rank} computes with {this}, rank 0 with {first}, and they "
                "round differently. Start all ranks on the same model of device with the same "
                "PyTorch (Slurm: --constraint), or leave --virtual-ranks out.",
                on_all_ranks=True,
            )


def promise_record(work: Work) -> dict[str, object]:
    """Return what the `start` record says of it."""
    if not work.world.virtual_ranks:
        return {}
    return {"arithmetic": arithmetic(work.world.device)}


def promise_notes(work: Work, path: Path) -> list[str]:
    """Return what is to be told of a run that goes on where other bits come out."""
    if not (work.world.virtual_ranks and work.world.is_main):
        return []
    starts = [r["arithmetic"] for r in read_records(path) if "arithmetic" in r]
    now = arithmetic(work.world.device)
    if not starts or starts[-1] == now:
        return []
    before, after = (" on ".join(one.values()) for one in (starts[-1], now))
    was = f"The run was trained with PyTorch {before}; here it is {after}."
    return [f"{was} From here on it is the same training to rounding, not to the last bit."]
