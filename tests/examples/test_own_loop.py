"""The example of a loop of one's own: few lines more than a plain loop, and the same training."""

import difflib
import json
import re
import signal
from pathlib import Path

import pytest

from samestep import read_records
from samestep.cli import main
from tests.session.same import account, assert_same
from tests.session.scripts import EXAMPLES, Strike, run

SCRIPT = EXAMPLES / "own_loop.py"
PLAIN = Path(__file__).parent / "plain_loop.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run of a single process."""
    folder = tmp_path_factory.mktemp("alone")
    ranks = run(SCRIPT, "run", folder=folder)
    assert "samestep:" not in ranks.output()
    return folder / "run"


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> Path:
    """The folder of the run of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    printed = run(SCRIPT, "run", world_size=2, folder=folder).output()
    assert len(re.findall("^epoch", printed, re.MULTILINE)) == 5  # rank 0 alone prints
    assert "epoch 5" in (folder / "run" / "rank-1.log").read_text()
    return folder / "run"


def test_it_takes_at_most_ten_lines_more_than_the_plain_loop():
    def lines(path: Path) -> list[str]:
        text = path.read_text().split('"""\n', maxsplit=1)[1]  # without the docstring
        return [line.strip() for line in text.splitlines() if line.strip()]

    differ = [line for line in difflib.ndiff(lines(PLAIN), lines(SCRIPT)) if line[0] == "+"]
    assert 5 < len(differ) <= 10, "\n".join(differ)


def test_ranks_with_unequal_shares_train_as_one_process(alone, on_two):
    assert_same(on_two, alone)


def test_a_run_that_was_stopped_goes_on_on_another_number_of_ranks(alone, tmp_path):
    stop = Strike(21, signal.SIGTERM)
    run(SCRIPT, "run", world_size=2, folder=tmp_path, strike=stop, code=128 + signal.SIGTERM)
    run(SCRIPT, "run", world_size=3, folder=tmp_path)
    assert_same(tmp_path / "run", alone)


def test_it_starts_anew_in_every_directory_and_does_nothing_where_the_run_is_finished(
    alone, tmp_path
):
    records = (alone / "events.jsonl").read_bytes()
    run(SCRIPT, str(alone), folder=tmp_path)
    assert (alone / "events.jsonl").read_bytes() == records


def test_compare_reads_two_such_runs(alone, on_two, capsys):
    assert main(["compare", str(alone), str(on_two), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_training"][0]["verdict"] in ("equal", "rounding")


def test_the_records_are_of_all_samples(alone):
    (start,) = (r for r in read_records(alone) if r["event"] == "start")
    assert (start["num_samples"], start["global_batch_size"], start["steps_per_epoch"]) == (
        *(1000, 64),
        16,
    )
    epochs = [r for r in account(alone) if r["event"] == "epoch"]
    assert [(r["epoch"], r["step"], r["samples"]) for r in epochs] == [
        (n, 16 * n, 1000) for n in range(1, 6)
    ]
    assert epochs[-1]["loss"] < 0.1 * epochs[0]["loss"]


def test_the_ported_loop_of_the_handbook_is_the_same_on_two_ranks_and_stops_early(tmp_path):
    """Both sides of docs/port-your-loop.md, as they stand there."""
    page = (EXAMPLES.parent / "docs" / "port-your-loop.md").read_text()
    plain, ported = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for size, name, text in ((1, "plain", plain), (1, "one", ported), (2, "two", ported)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "ported.py").write_text(text)
        said = run(folder / "ported.py", world_size=size, folder=folder).output()
        assert "best" in said
    one, two = (tmp_path / name / "runs" / "ported" for name in ("one", "two"))
    assert_same(two, one, 1e-7)
    result = json.loads((one / "result.json").read_text())
    assert result["status"] == "completed"
    assert result["epochs"] < 30 or result["reason"] == "finished"
