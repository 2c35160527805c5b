"""`samestep verify` with ranks from the fork server: real processes, tenths of a second each."""

import json
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep.core.recipe import Accepted
from samestep.core.session.request import Request
from samestep.launch.ranks.process import TASK
from samestep.launch.ranks.start import Ended
from samestep.prove.verification.evidence import Check, Evidence
from samestep.prove.verification.harness import Starts, Verification, VerifyOptions, starting
from samestep.prove.verification.verify_loop import verify_loop
from samestep.prove.verification.verify_recipe import gather
from samestep.shell.commands.target import parse_target
from samestep.shell.commands.verify import FORM
from tests.command_line import end_with_first_failure
from tests.processes import start_ranks


@dataclass(frozen=True)
class Gathered:  # what the real processes of one verification left; it may be judged several times
    request: Request
    starts: Starts
    evidence: Evidence

    def judged(
        self, accept: tuple[Accepted, ...] = (), tolerance: float | None = None
    ) -> Verification:
        recipe, options = self.request.recipe, replace(self.starts.options, tolerance=tolerance)
        starts = replace(self.starts, options=options, accepted=frozenset(accept))
        return starts.answer(recipe.name, self.evidence, recipe.accepts)


def gathered(
    recipe: Path | str,
    *flags: str,
    folder: Path,
    sizes: tuple[int, ...] = (1, 2),
    lightning: bool = False,
    quick: bool = False,
    **more: Any,
) -> Gathered:
    """Run all starts of a recipe; the ranks do what those of the command do."""
    arguments = [str(recipe), "--device", "cpu", *flags]
    _, request = parse_target(FORM, arguments)
    options, launch = VerifyOptions(sizes=sizes, quick=quick), partial(_launch, arguments, folder)
    with starting(options, request.settings, launch) as starts:
        evidence = gather(request, starts, lightning=lightning, **more)
    return Gathered(request, starts, evidence)


def verified_loop(
    script: Path, *arguments: str, folder: Path, sizes: tuple[int, ...] = (1, 2), **more: Any
) -> Verification:
    """Verify a script with a loop of its own; it is started by name, as a user would."""
    options = VerifyOptions(sizes=sizes, **{"quick": True, **more})
    return verify_loop(script, arguments, options, partial(_launch, [str(script)], folder))


def _launch(arguments: list[str], folder: Path, num_ranks: int, task: Path, _: str = "") -> Ended:
    place = folder / task.stem
    ranks = start_ranks(_rank, num_ranks, place, arguments, str(task), str(place))
    code = end_with_first_failure(ranks)
    messages = [path.read_text() for path in sorted(place.glob("error-*.json"))]
    message = json.loads(messages[0])["message"]["message"] if messages else ranks.output()
    return Ended(code, message if code else "")


def verified(recipe: Path | str, *flags: str, folder: Path, **more: Any) -> Verification:
    return gathered(recipe, *flags, folder=folder, **more).judged()


def check(found: Verification, name: str) -> Check:
    return next(check for check in found.checks if check.name == name)


def differing(found: Verification) -> dict[str, str | None]:
    return {check.name: check.cause.name for check in found.checks if not check.passed}


def assert_nothing_to_accept(found: Verification, of_ranks: str) -> None:
    assert found.same, [(row.name, row.cause) for row in found.checks if not row.passed]
    assert {row.status for row in found.checks} <= {"same", "skipped"}
    for name in (of_ranks, "accumulation", "stop and resume", "samples apart", "loss"):
        assert check(found, name).status == "same", name


def _rank(arguments: list[str], instructions: str, place: str) -> None:
    import sys

    from samestep.shell.commands.verify import main

    os.environ[TASK] = instructions
    os.environ["SAMESTEP_PARENT"] = str(os.getppid())
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{place}/error-{os.environ.get('RANK', '0')}.json"
    code = main(arguments)

    sys.exit(code)
