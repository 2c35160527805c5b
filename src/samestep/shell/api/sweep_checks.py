"""What is checked of a sweep before its first training begins: each training by itself, and all.

The verb and the function in Python check the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from samestep.base.errors import UserError
from samestep.cluster.sweeping.sweep_plan import Point
from samestep.core.session.request import Request
from samestep.core.training.plan import batch_sizes


def check_trainings(
    points: Iterable[Point], request_of: Callable[[Point], Request], num_ranks: int
) -> list[Request]:
    """Check trainings before the first begins; return the request of each point.

    Raises:
        UserError: one would be refused, by itself or by its engine, or two are the same training.
    """
    found: list[Request] = []
    seen: dict[str, str] = {}
    for point in points:
        try:
            request = request_of(point)
            _check_alone(request, num_ranks)
        except UserError as error:
            if not found:
                raise
            raise UserError(f"{error} (It is with {_typed(point)}; none was begun.)") from error
        what = repr((replace(request.settings, run_dir=None), request.options))
        if (other := seen.setdefault(what, _typed(point))) != _typed(point):
            raise UserError(
                f"{other} and {_typed(point)} are the same training. Give each value once."
            )
        found.append(request)
    return found


def _check_alone(request: Request, num_ranks: int) -> None:
    """Check what a training's settings say of its engine and its batch."""
    settings = request.settings
    if settings.engine == "lightning":
        from samestep.bridges.lightning.engine import check_settings  # noqa: PLC0415 - rarely needed

        check_settings(settings, request.recipe)
    if settings.batch_tokens is None:  # else the data decides
        virtual = settings.virtual_ranks
        batch_sizes(settings, virtual or num_ranks, "virtual ranks" if virtual else "ranks", None)


def _typed(point: Point) -> str:
    return " ".join(f"--{flag} {text}" for flag, text in point.items())
