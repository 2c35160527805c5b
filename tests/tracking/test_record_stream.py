"""What of events.jsonl a tracker is given: each step of each series once, whatever was repeated."""

import json
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.base.errors import UserError
from samestep.base.run.pictures import png
from samestep.base.run.records import read_records
from samestep.base.words import flatten
from samestep.show.tracking import follower, processes
from samestep.show.tracking.processes import Deliveries, Delivery, deliveries_path, read_deliveries
from samestep.show.tracking.record_stream import RecordStream, scalars
from tests.command_line import typed


def all_of(entries, after=0):
    return [entry for piece in entries.read(after) for entry in piece]


def write(run: Path, records, torn=""):
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (run / "events.jsonl").write_text(lines + torn)


def execution(first, last, checkpoint, *, resumed):
    """Return the records of one execution: steps of a deterministic training, one checkpoint."""
    records = [{"event": "start", "time": 100.0 * first, "resumed": resumed}]
    if resumed:
        records.append({"event": "resume", "step": first, "checkpoint": f"c{first}.pt"})
    for step in range(first + 1, last + 1):
        at = {"step": step, "epoch": 1}
        records.append({"event": "step", **at, "loss": 1 / step, "seconds": float(step)})
        if step % 3 == 0:
            more = {"split": "validation", "loss": 2 / step}
            records.append({"event": "evaluation", **at, **more})
        if step == checkpoint:
            records.append({"event": "checkpoint", "step": step, "path": f"checkpoints/c{step}.pt"})
    return records


@st.composite
def executions(draw):
    """Draw a run of several executions, each killed at some step after its checkpoint."""
    records, first = [], 0
    for number in range(draw(st.integers(1, 4))):
        checkpoint = first + draw(st.integers(1, 5))
        last = checkpoint + draw(st.integers(0, 5))
        records += execution(first, last, checkpoint, resumed=number > 0)
        first = checkpoint
    return records


@settings(max_examples=25)
@given(executions(), st.integers(0, 60), st.data())
def test_each_step_of_each_series_comes_once_in_order(records, have, data):
    with TemporaryDirectory() as folder:
        run = Path(folder)
        write(run, records)
        entries = all_of(RecordStream(run))
        for event in ("step", "validation"):
            steps = [entry.step for entry in entries if entry.event == event]
            assert steps == sorted(set(steps))
        # With what is still to be repeated, it is what one uninterrupted run would have told.
        kept = {(r["step"], r["loss"]) for r in read_records(run) if r["event"] == "step"}
        got = {(e.step, e.values["train/loss"]) for e in entries if e.event == "step"}
        assert kept <= got
        assert [e.time for e in entries] == sorted(e.time for e in entries)
        # One who has the first lines already gets the others, and nothing twice.
        rest = all_of(RecordStream(run), after=have)
        assert [e.line for e in rest] == [e.line for e in entries if e.line >= have]
        # Read while it grows, it is the same.
        cut = data.draw(st.integers(0, len(records)))
        write(run, records[:cut], torn='{"event": "st')
        grows = RecordStream(run)
        first = all_of(grows)
        write(run, records)
        assert first + all_of(grows) == entries


def test_numbers_are_flattened_and_stand_at_their_epoch_or_step(tmp_path):
    record = {"event": "step", "step": 4, "epoch": 1, "loss": None, "lr": 0.5, "note": "x"}
    nested = {"phases": {"data": 0.25, "ranks": {"0": 1}}, "done": True, "rows": [1, 2]}
    write(tmp_path, [record | nested])
    (entry,) = all_of(RecordStream(tmp_path))
    assert entry.values == {"train/lr": 0.5, "train/phases/data": 0.25, "train/phases/ranks/0": 1}
    assert (entry.axis, entry.at) == ("step", 4)
    table = {"lr": 0.5, "drop_last": True, "options": {"dims": [4, 2]}, "none": None}
    assert scalars(table) == {"lr": 0.5, "drop_last": True, "options.dims": "[4, 2]"}
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a/b/c": 1, "d": 2}
    at = {"step": 30, "epoch": 3}
    classes = {"per_class": {"cat": 0.5, "dog": None}}
    tested = {"event": "evaluation", "split": "test", **at, **classes}
    write(tmp_path, [{"event": "epoch", **at, "loss": 1.0}, tested])
    epoch, test = all_of(RecordStream(tmp_path))
    assert (epoch.at, epoch.values) == (3, {"epoch/loss": 1.0})
    assert (test.at, test.values) == (30, {"test/per_class/cat": 0.5})


def picture(path, name="one", step=4):
    return {"event": "picture", "step": step, "name": name, "path": path, "title": "One"}


def test_a_picture_is_read_from_the_run_directory_alone(tmp_path):
    run = tmp_path / "run"
    (run / "pictures").mkdir(parents=True)
    image = png(bytes(12), 2, 2, 3)
    for file in (run / "pictures" / "one.png", tmp_path / "secret.png"):
        file.write_bytes(image)
    (run / "pictures" / "link.png").symlink_to(tmp_path / "secret.png")
    (run / "pictures" / "text.png").write_text("no PNG")
    records = [
        picture("pictures/one.png"),
        picture("../secret.png", "a"),
        picture(str(tmp_path / "secret.png"), "b"),
        picture("pictures/link.png", "c"),
        picture("pictures/one.png", "../d"),
        picture("pictures/gone.png", "e"),
        picture("pictures/text.png", "f"),
        {"event": "picture", "step": 4, "name": "g", "problem": "it could not be drawn"},
        picture("pictures/one.png"),
        picture("pictures/one.png", step=5),
    ]
    write(run, records)
    stream = RecordStream(run)
    found = all_of(stream)
    shown = [(e.event, e.picture.name, e.step, e.values, e.picture.png()) for e in found]
    assert shown == [
        ("picture", "one", 4, {}, image),
        ("picture", "e", 4, {}, None),
        ("picture", "f", 4, {}, None),
        ("picture", "one", 5, {}, image),
    ]
    assert stream.events.damaged == [2, 3, 4, 5]


def test_the_confusion_matrix_of_a_test_is_a_picture(tmp_path):
    test = {"event": "evaluation", "split": "test", "step": 30, "epoch": 3, "loss": 1.0}
    names = {"cat": 0.5, "<script>$x^": None, "_": 0.0}
    whole = {"per_class": names, "confusion": [[1, 1, 0], [0, 0, 0], [3, 0, 0]]}
    broken = {"per_class": names, "confusion": [[1, 1, 0], [0, 0]]}
    write(tmp_path, [{**test, **whole}, {**test, **broken, "step": 31}])
    first, shown, second = all_of(RecordStream(tmp_path))
    assert (first.event, shown.event, second.event) == ("test", "picture", "test")
    assert (shown.step, shown.line, shown.values) == (30, 0, {})
    content = shown.picture.png()
    assert struct.unpack(">II", content[16:24]) > (100, 100)


def metrics(step, time, /, **values):
    return {"event": "metrics", "step": step, "epoch": 1, "time": time, "values": values}


def test_metrics_keep_their_own_names_and_each_step_counts_once_for_each_set_of_them(tmp_path):
    records = [
        {"event": "start", "time": 100.0, "resumed": False},
        metrics(4, 101.0, step=7, loss=0.5, odd=None),
        metrics(4, 102.0, **{"val/loss": 2}),
        metrics(5, 103.0, step=8, loss=0.25, odd=1.0),
        {"event": "start", "time": 50.0, "resumed": True},  # another node's clock
        metrics(4, 51.0, **{"val/loss": 3}),
        metrics(5, 52.0, loss=0.25, step=8, odd=1.0),
        metrics(6, 53.0, **{"val/loss": 4}),
        {"event": "metrics", "step": 7, "epoch": 1, "time": 104.0, "values": [1]},
        {"event": "metrics", "step": 7, "epoch": 1, "time": 104.0, "values": "no"},
        {"event": "metrics", "step": 7, "epoch": 1, "values": {"loss": 1}},
    ]
    write(tmp_path, records)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "st\n\xff\n[]\n{"event": "step"}\n')
    entries = RecordStream(tmp_path)
    found = [(e.event, e.axis, e.at, e.epoch, e.time, e.values) for e in all_of(entries)]
    assert found == [
        ("metrics", "step", 4, 1, 101.0, {"step": 7, "loss": 0.5}),
        ("metrics", "step", 4, 1, 102.0, {"val/loss": 2}),
        ("metrics", "step", 5, 1, 103.0, {"step": 8, "loss": 0.25, "odd": 1.0}),
        ("metrics", "step", 6, 1, 103.0, {"val/loss": 4}),
    ]
    assert sorted(entries.events.damaged) == [*range(9, 16)], "they are left out and named"


def test_a_line_that_is_completed_while_the_file_is_read_counts_once_and_whole(tmp_path):
    records = execution(0, 9, 99, resumed=False)
    lines = [json.dumps(record) + "\n" for record in records]
    whole, rest = "".join(lines[:4]) + lines[4][:9], lines[4][9:] + "".join(lines[5:])
    path = tmp_path / "events.jsonl"
    path.write_text(whole)
    entries, found = RecordStream(tmp_path), []
    for piece in entries.read():
        found += piece
        with path.open("a") as file:  # the training writes on, before the next look
            file.write(rest)
            rest = ""
    assert not rest
    assert entries.events.torn
    found += all_of(entries)
    assert [entry.line for entry in found] == list(range(1, len(lines)))
    assert entries.events.num_read == len(lines)
    assert entries.events.damaged == []
    assert not entries.events.torn


def test_what_a_tracker_prints_has_no_secrets_and_its_ledger_is_read(tmp_path):
    """No secret hides behind quotes, and none is taken for a word of the report itself."""
    program = f"""
import os
from pathlib import Path
from samestep.show.tracking.follower import Reports
voice = Reports(("planted-secret", "planted", 'pä"55word', "offline"))
print("early planted-secret")
os.write(2, b"of C: http://me:pass@host/ planted\\n")
os.system("echo of a child: planted-secret")
voice.log_to(Path({str(tmp_path / "log")!r}))
voice.send(failed='planted-secret and pä"55word are wrong', offline=True)
voice.close()
"""
    done = typed("-c", program)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"failed": "… and … are wrong", "offline": True}
    log = (tmp_path / "log").read_text()
    assert sorted(log.splitlines()) == ["early …", "of C: http://host/ …", "of a child: …"]
    (tmp_path / "tracking").mkdir()
    fresh = read_deliveries(tmp_path, "wandb")
    assert len(fresh.id) == 32
    ledger = Deliveries(
        online=Delivery(run="r", lines=7), offline=Delivery(files=["a"], finished=True)
    )
    processes.write_deliveries(tmp_path, "wandb", ledger)
    assert read_deliveries(tmp_path, "wandb") == ledger
    for text in ("", "{}x", '{"online": 3}'):
        deliveries_path(tmp_path, "wandb").write_text(text)
        with pytest.raises(UserError, match=r"wandb\.json"):
            read_deliveries(tmp_path, "wandb")


def test_of_a_machines_gpus_those_of_the_ranks_are_told_by_what_the_driver_knows(tmp_path):
    rows = ["GPU-a,37,5120,210.50,61", "GPU-b,0,[N/A],[Not Supported],33"]
    rows = [row.split(",") for row in rows]
    first = {"utilization_percent": 37.0, "memory_used_mib": 5120.0, "power_w": 210.5}
    assert follower.numbers_of_gpus(rows, None) == {
        "gpu0": first | {"temperature_c": 61.0},
        "gpu1": {"utilization_percent": 0.0, "temperature_c": 33.0},
    }
    rows = [row.split() for row in ("GPU-aa-1 1 2 3 4", "GPU-bb-2 5 6 7 8", "GPU-cc-3 9 10 11 12")]
    assert follower.numbers_of_gpus(rows, ["bb-2", "elsewhere"]).keys() == {"gpu1"}
    assert follower.numbers_of_gpus(rows, ["bb-2"])["gpu1"]["memory_used_mib"] == 6.0
    assert follower.numbers_of_gpus(rows, None).keys() == {"gpu0", "gpu1", "gpu2"}
    assert follower.gpus_of(tmp_path) == ()  # a run that has not begun says nothing
    (tmp_path / "environment.json").write_text('{"gpus": ["bb-2"]}')
    assert follower.gpus_of(tmp_path) == ["bb-2"]
    (tmp_path / "environment.json").write_text("{}")
    assert follower.gpus_of(tmp_path) is None
