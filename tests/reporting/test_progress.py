"""What a training shows: a bar that keeps its length, rows that break no word, plain lines else."""

import errno
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from samestep.base.counting import counting
from samestep.base.run.records import samples_per_step
from samestep.shell.api.call import as_in_fresh_process
from samestep.show.progress import BarState, Screen
from tests.command_line import call
from tests.tiny import all_records, read_index, write_recipe

PLAN = dict.fromkeys(("world_size", "num_nodes", "threads", "accumulate"), 1)
PLAN |= {"event": "start", "recipe": "toy", "device": "cpu", "precision": "fp32", "epochs": 12}
PLAN |= {"micro_batch_size": 32, "global_batch_size": 32, "num_samples": 7000, "parameters": 2834}
PLAN |= {"lr": 0.001, "lr_scaling": "none", "steps_per_epoch": 219, "total_steps": 2628}
PLAN |= {
    "monitor": "accuracy",
    "run_dir": "/a/directory/whose/name/is/too/long/for/the/terminal/runs/toy-20261122-142301",
    "notes": ["The data has eleven samples that cannot be read, and they are left out of the run."],
}
BAR = {"plan": PLAN, "step_samples": 32}
RESULT = {"status": "completed", "reason": "finished", "epochs": 12, "steps": 2628}
RESULT |= {"training_seconds": 1.5, "samples_per_s": 48_800.0}
RESULT |= {
    "best": {"metric": "accuracy", "value": 0.99, "epoch": 12},
    "test": {"loss": 0.1, "accuracy": 0.99, "samples": 1500, "checkpoint": "checkpoint_epoch_12"},
}


def progress(step: int, rate: float = 48_800.0, **more) -> dict:
    return {"event": "progress", "step": step, "samples_per_s": rate, **more}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_keeps_its_length_whatever_the_numbers_are(width):
    state = BarState(**BAR)
    lengths = {len(state.numbers(width)) + len(state.epoch)}
    for step, rate, loss in ((1, 3.0, 10.5), (219, 942.0, 2.3), (2628, 1.13e6, 0.0001)):
        state = state.after(progress(step, rate, loss=loss))
        lengths.add(len(state.numbers(width)) + len(state.epoch))
    (length,) = lengths
    assert length <= width - 20


def test_the_bar_tells_what_there_is_room_for_and_breaks_no_word():
    state = BarState(**BAR, metric="val. accuracy 0.9000").after(progress(657, loss=0.25))
    narrow, wide = state.numbers(60), state.numbers(140)
    for words in (" 25%", "657/2,628"):
        assert words in narrow
        assert words in wide
    for words in ("loss 0.2500", "val. accuracy 0.9000", "48.8k samples/s", "ETA 1 s"):
        assert words in wide
    uneven = PLAN | {"num_samples": 33, "global_batch_size": 32, "steps_per_epoch": 2}
    assert samples_per_step(uneven) == 16.5, "half of the steps have one sample"
    state = BarState(**BAR)
    for rate in (1000.0, 1000.0, 10.0):
        state = state.after(progress(100, rate))
    assert 700 < state.rate < 900
    state = BarState(**BAR).after(progress(656, loss=0.25)).after(progress(657))
    assert "loss 0.2500" in state.numbers(140)
    assert "loss not finite" in state.after(progress(658, loss=None)).numbers(140)
    lines = [line for line in shown(60, terminal=True) if "━" not in line]
    assert all(len(line) <= 60 or PLAN["run_dir"] in line for line in lines)
    assert sum(PLAN["run_dir"] in line for line in lines) == 2
    for words in ("accuracy 0.7500", "another_metric 0.1250", "10k samples/s", "48.8k"):
        assert any(words in line for line in lines)
    lines = shown(60, terminal=False)
    assert any(line.endswith(PLAN["notes"][0]) for line in lines)
    (epoch,) = [line for line in lines if line.startswith("epoch")]
    assert epoch.endswith("another_metric 0.1250  10k samples/s")


@pytest.mark.parametrize(("step", "epoch"), [(0, 1), (1, 1), (219, 1), (220, 2), (2628, 12)])
def test_the_last_step_of_an_epoch_belongs_to_it(step, epoch):
    state = BarState(**BAR, step=step)
    assert state.epoch.split("/") == [f"{epoch:>2}", "12"]


def shown(width: int, *, terminal: bool) -> list[str]:
    file = io.StringIO()
    screen = Screen(Console(file=file, width=width, force_terminal=terminal, color_system=None))
    with screen:
        screen.show(PLAN)
        screen.show({"event": "epoch", "epoch": 1, "step": 219, "loss": 0.6, "samples_per_s": 1e4})
        values = {"loss": 0.5, "accuracy": 0.75, "another_metric": 0.125}
        screen.show(
            {"event": "evaluation", "split": "validation", "epoch": 1, "step": 219, **values}
        )
    screen.result(Path(PLAN["run_dir"]), RESULT)
    lines = file.getvalue().replace("\r", "\n").splitlines()
    return [line.rstrip() for line in lines if line.strip() and "\x1b" not in line]


@pytest.fixture
def terminal(monkeypatch):
    """Let what is shown on standard error go to a terminal that is read here."""
    file = io.StringIO()
    console = Console(file=file, width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr("samestep.base.counting.Console", lambda **_: console)
    return file


def test_rank_0_alone_shows_how_far_what_takes_its_time_is(terminal):
    for shown in (False, True):
        assert not terminal.getvalue()
        with counting("decoding images", 60_000, shown=shown) as count:
            count(15_000)
    assert "15000/60000" in terminal.getvalue()
    assert "25%" in terminal.getvalue()


@pytest.mark.parametrize(("total", "lines"), [(60_000, 1), (60, 0)])
def test_off_a_terminal_only_much_work_is_told(capfd, total, lines):
    with counting("decoding images", total, shown=True) as count:
        count(total)
    assert capfd.readouterr().err.count("\n") == lines


def test_decoding_counts_every_image_once():
    from samestep.core.data.images.decode import UnreadableImageError
    from samestep.core.data.images.image_files import decode_in_threads

    def decode(path):
        if path == "7":
            raise UnreadableImageError("broken")

    counted = []
    files = SimpleNamespace(path=str)
    broken = decode_in_threads(files, range(100), lambda *_: None, decode, 2, counted.append)
    assert sum(counted) == 100
    assert list(broken) == [7]


@pytest.mark.parametrize(("mfu", "ends"), [(0.412, "  41.2% MFU  7.52 GB"), (None, "samples/s")])
def test_the_line_of_an_epoch_has_mfu_and_memory_only_where_the_device_is_known(mfu, ends):
    file = io.StringIO()
    known = {} if mfu is None else {"mfu": mfu}
    epoch = {"event": "epoch", "epoch": 1, "step": 219, "loss": 0.6, "samples_per_s": 1e4}
    with Screen(Console(file=file, width=120, color_system=None)) as screen:
        screen.show(PLAN)
        screen.show(epoch | known | {"peak_memory_bytes": 7 << 30})
        screen.show(epoch | {"epoch": 2})
    (line,) = [line for line in file.getvalue().splitlines() if line.startswith("epoch  1")]
    assert line.endswith(ends)


class FullOutput(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def into(output: io.TextIOBase | None, run: Path, monkeypatch) -> list[dict]:
    """Train with this as standard output, to a good end; return the records."""
    recipe = write_recipe(run.parent)
    with as_in_fresh_process(), monkeypatch.context() as patch:
        patch.setattr("sys.stdout", output)
        assert call("train", str(recipe), "--run-dir", str(run), "--max-steps", "14") == 0
    return all_records(run)


@pytest.mark.parametrize("output", [FullOutput(), None], ids=["full", "closed"])
def test_where_the_output_takes_nothing_the_training_goes_on(output, tmp_path, monkeypatch):
    records = into(output, tmp_path / "run", monkeypatch)
    (told,) = (r["text"] for r in records if r["event"] == "screen")
    assert ("quota" if output else "closed") in told
    assert records[-1]["reason"] == "finished"
    assert read_index(tmp_path / "run")["last"]["step"] == 14


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_the_output_does_not_have_are_replaced(encoding, tmp_path, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    records = into(output, tmp_path / "run", monkeypatch)
    assert not any(r["event"] == "screen" for r in records)
    shown = output.buffer.getvalue().decode(encoding)
    assert "12 samples per step = 12 " in shown
    assert "trained  " in shown
