"""`samestep verify` with ranks from the fork server: real processes, tenths of a second each."""

import json
import os
from pathlib import Path

from samestep.commands.verify import _parse
from samestep.ranks.start import Ended
from samestep.recipe import Accepted
from samestep.verification.evidence import Check
from samestep.verification.procedure import ORDER_FILE, Report, verify
from tests.processes import start_ranks


def verified(
    recipe: Path | str,
    *flags: str,
    folder: Path,
    sizes: tuple[int, ...] = (1, 2),
    accept: tuple[Accepted, ...] = (),
    tolerance: float | None = None,
    batch: int | None = None,
    lightning: bool = False,
) -> Report:
    """Verify a recipe; the ranks do what those of the command do."""
    arguments = [str(recipe), "--device", "cpu", *flags]
    _, request = _parse(arguments[0], arguments[1:])

    def launch(num_ranks: int, order: Path) -> Ended:
        place = folder / order.stem
        ranks = start_ranks(_rank, num_ranks, place, arguments, str(order), str(place))
        codes = ranks.wait()
        code = next((code for code in codes if code), 0)
        messages = [path.read_text() for path in sorted(place.glob("error-*.json"))]
        message = json.loads(messages[0])["message"]["message"] if messages else ranks.output()
        return Ended(code, message if code else "")

    return verify(
        request, sizes, launch, accept=accept, tolerance=tolerance, batch=batch, lightning=lightning
    )


def check(report: Report, name: str) -> Check:
    """Return a row by its name."""
    return next(check for check in report.checks if check.name == name)


def differing(report: Report) -> dict[str, str | None]:
    """Return the rows that call the training different, with their causes."""
    return {check.name: check.cause for check in report.checks if not check.passed}


def _rank(arguments: list[str], order: str, place: str) -> None:
    import sys

    from samestep.commands.verify import main

    os.environ[ORDER_FILE] = order
    os.environ["SAMESTEP_PARENT"] = str(os.getppid())
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{place}/error-{os.environ.get('RANK', '0')}.json"
    code = main(arguments)

    sys.exit(code)
