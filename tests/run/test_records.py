"""A run tells the format that it was written in; a newer one is refused by whoever reads it."""

import json
import os

import pytest

from samestep import UserError, read_records
from samestep.reporting.run_data import read_run
from samestep.run.directory import Run
from samestep.run.records import RUN_FORMAT, parse_lines
from samestep.tracking.processes import send_run
from tests.reporting.made_runs import change_start, write_run
from tests.tiny import files

READERS = {
    "read_records": lambda run: list(read_records(str(run))),
    "compare": read_run,
    "resume": lambda run: Run(run).close(),
    "track": lambda run: send_run(run, {"track": "tests.tracking.own_tracker"}, print),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_run_of_a_newer_format_is_refused_with_both_numbers_and_left_as_it_is(tmp_path, reader):
    run = write_run(tmp_path / "run")
    change_start(run, format=RUN_FORMAT + 7)
    before = files(run)
    with pytest.raises(UserError) as refused:
        READERS[reader](run)
    for named in (str(run), f"format {RUN_FORMAT + 7}", f"to {RUN_FORMAT}."):
        assert named in str(refused.value)
    after = files(run)
    assert {name: after[name] for name in before} == before


def test_a_line_that_a_kill_tore_off_is_cut_away_before_the_next_record(tmp_path):
    path = tmp_path / "events.jsonl"
    for torn in ("", '{"event": "st'):
        path.write_text('{"event": "compile"}\n' + torn)
        run = Run(tmp_path)
        run.append({"event": "stop"})
        run.close()
        assert path.read_text() == '{"event": "compile"}\n{"event": "stop"}\n'


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"[]", b"7", b'{"event": ["step"]}', b'{"step": 1}', b'{"event": "step", "st'),
        *(b"\xff", b"[" * 100_000, b'{"event": "step", "step": -1}', b'{"loss": NaN'),
    ],
)
def test_a_line_without_a_record_is_left_out_and_its_neighbours_are_read(line):
    good = b'{"event": "stop", "step": 3, "reason": "all epochs"}'
    found = parse_lines(b"\n".join([good, line, good]) + b"\n", checked=True)
    assert [one is None for one in found] == [False, True, False]


def test_nan_of_an_earlier_version_is_null():
    assert parse_lines(b'{"event": "own", "loss": NaN}\n') == [{"event": "own", "loss": None}]


def test_a_path_that_is_not_utf_8_is_no_damage(tmp_path):
    path = write_run(tmp_path / "run")
    events = path / "events.jsonl"
    first, *others = events.read_text().splitlines()
    start = json.loads(first) | {"run_dir": os.fsdecode(b"x_\xff")}
    events.write_text("\n".join([json.dumps(start), *others, ""]))
    assert len(list(read_records(path))) == len(list(read_records(write_run(tmp_path / "plain"))))
