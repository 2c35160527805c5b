"""Stop trainings by signals, several by one start of ranks: each start would take its time."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults import Fault, command_line
from tests.processes import free_port, run_ranks


def stop_all(
    stops: Sequence[tuple[Fault, Sequence[str | Path]]],
    *,
    on: int,
    folder: Path,
    agree_every_s: float | None = None,
) -> str:
    """Train one after the other on the same ranks, each until its signal ends it."""
    faults, words = [fault for fault, _ in stops], [[*map(str, words)] for _, words in stops]
    output = folder / f"stopped-on-{on}"
    ports = [free_port() for _ in stops]
    run_ranks(_stop_one_by_one, on, output, faults, words, ports, agree_every_s)
    return (output / "output-0.txt").read_text()


def _stop_one_by_one(
    faults: list[Fault], trainings: list[list[str]], ports: list[int], agree_every_s: float | None
) -> None:
    from samestep.core.training import stopping
    from samestep.shell.api.call import as_in_fresh_process

    if agree_every_s is not None:
        stopping._AGREE_EVERY_S = agree_every_s
    for fault, words, port in zip(faults, trainings, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with as_in_fresh_process(), pytest.raises(SystemExit) as ended:
            command_line(["train", *words], (fault,))
        assert ended.value.code == 128 + fault.signum, words
