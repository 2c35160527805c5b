"""A tracker's process beside a training: it sends each step once, and whatever it does harms none.

The tracker is one of a user's own, which can be told to misbehave (own_tracker.py).
"""

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from samestep import read_records
from tests import tiny
from tests.command_line import read_json
from tests.faults import Fault
from tests.loops import scripts
from tests.processes import Ranks, start_ranks
from tests.tracking import own_tracker
from tests.tracking.readers import expected

TRACKER = str(Path(own_tracker.__file__))
TRACK = ("--track", Path(TRACKER))
PATIENCE_S = 150.0
"""Of a busy machine, where nothing is to be given up."""


def command_line(arguments, environment, faults=(), end_s=PATIENCE_S):
    """Run `samestep` on this rank, which waits so long for its trackers at the end."""
    os.environ.update(environment)
    from samestep.show.tracking import processes
    from tests import faults as planted

    processes.END_S = end_s
    planted.command_line(arguments, faults)


def samestep(*arguments, folder, world_size=1, faults=(), end_s=PATIENCE_S, **environment):
    output = folder / f"output-{len(list(folder.glob('output-*')))}"
    return start_ranks(
        command_line, world_size, output, [str(a) for a in arguments], environment, faults, end_s
    )


def train(*arguments, folder, **more):  # train to the good end; return the ranks that did
    ranks = samestep("train", *arguments, folder=folder, **more)
    assert set(ranks.wait()) == {0}, ranks.output()
    return ranks


def send(run, folder, code=0, to=TRACKER, **environment):
    """Run `samestep track` with the test's tracker; return what it printed."""
    ranks = samestep("track", run, "--to", to, folder=folder, **environment)
    assert ranks.wait() == [code], ranks.output()
    return ranks.output()


def sent(run, service="service"):
    series = {}
    for line in own_tracker.lines(run, service):
        if line["what"] not in ("start", "finish", "system", "checkpoint"):
            name = {"step": "train"}.get(line["what"], line["what"])
            series.setdefault(name, []).append((line["step"], line["epoch"], line["values"]))
    return series


def what(run, event, service="service"):
    return [line for line in own_tracker.lines(run, service) if line["what"] == event]


def children_of(run, service="service"):
    return [line["pid"] for line in what(run, "start", service) if _runs(line["pid"])]


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # nobody may have asked for it
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Training:
    folder: Path
    recipe: Path
    run: Path

    def start(self, *flags, target=None, **more) -> Ranks:
        words = [w for flag in flags for w in (flag.split() if isinstance(flag, str) else [flag])]
        place = () if target else ("--run-dir", self.run)
        return samestep("train", target or self.recipe, *words, *place, folder=self.folder, **more)

    def train(self, *flags, code=0, **more) -> Ranks:  # run it to its end
        ranks = self.start(*flags, **more)
        assert set(ranks.wait()) == {code}, ranks.output()
        return ranks

    def resume(self, *flags, **more) -> Ranks:
        return self.train("--resume", *flags, target=self.run, **more)

    def change(self, before, after):
        assert before in tiny.RECIPE
        tiny.write_recipe(self.folder, tiny.RECIPE.replace(before, after))

    def tracker(self, name, text):
        path = self.folder / f"{name}.py"
        path.write_text(text)
        return path

    def faulty(self, faults):
        """Write a tracker for each fault, by its name, which it has while TRACKER_FAULT is set."""
        text, found = Path(TRACKER).read_text(), {}
        for fault in faults:
            name = fault.replace(":", "_").replace(" ", "_")
            planted = f'os.environ["TRACKER_FAULT"] = {fault!r}'
            begin = f'import os\nif "TRACKER_FAULT" in os.environ:\n    {planted}\n'
            found[name] = self.tracker(name, begin + text.replace(".service", f".{name}"))
        return found


@pytest.fixture
def here(tmp_path) -> Training:
    return Training(tmp_path, tiny.write_recipe(tmp_path), tmp_path / "run")


@pytest.mark.parametrize("engine", ["native", pytest.param("lightning", marks=pytest.mark.slow)])
def test_one_tracker_run_gets_every_record_in_its_order_whatever_the_engine(here, engine):
    here.change('    "checkpoint_every_steps": 4,\n', "")
    flags = f"--engine {engine} --epochs 2 --track-tags a,b --track-workspace us"
    # Lightning's ranks are samestep's own, the others a launcher's.
    nproc, launched = ("--nproc 2", 1) if engine == "lightning" else ("", 2)
    ranks, run = here.train(*TRACK, flags, nproc, world_size=launched), here.run
    assert sent(run) == expected(run)
    (start,), (finish,) = what(run, "start"), what(run, "finish")
    assert (start["project"], start["name"]) == ("tiny", "run")
    assert (start["tags"], start["workspace"]) == (["a", "b"], "us")
    assert start["settings"].items() >= {"lr": 0.01, "options.hidden": 16}.items()
    assert start["facts"].items() >= {"world_size": 2, "parameters": 178}.items()
    assert start["facts"]["monitor"] == "accuracy"
    assert start["facts"]["lower_is_better"] == '["loss"]'
    assert not start["has_torch"], "a tracker needs no PyTorch, and PyTorch no tracker"
    assert start["group"] == start["pid"], "Ctrl-C in the terminal is for the training alone"
    assert finish["status"] == "completed"
    assert finish["values"]["best.mode"] == "max"
    assert finish["values"]["test.loss"] == read_json(run / "result.json")["test"]["loss"]
    assert {line["axis"] for line in what(run, "epoch")} == {"epoch"}
    assert {line["axis"] for line in what(run, "step") + what(run, "validation")} == {"step"}
    assert len(what(run, "system")) == 1, "a short run is measured once"
    assert ranks.output().count("https://tracker.example/the-run") == 1
    assert not children_of(run)
    records = [x for x in own_tracker.lines(run) if x["what"] not in ("start", "finish", "system")]
    times = [line["time"] for line in records]
    assert times == sorted(times), "times of records never go back"
    assert times[0] >= next(r["time"] for r in read_records(run) if r["event"] == "start")
    assert not what(run, "checkpoint"), "they were not asked for"
    assert not (run / "tracking" / "own_tracker.log").exists(), "it has printed nothing"


OWN_LOOP = """import samestep, sys, torch
with samestep.open_run("run", resume=True, log_every=1, track=TRACK) as run:
    model = run.place(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in run.epochs(int(sys.argv[1]), state={"model": model, "optimizer": optimizer}):
        for batch in run.batches(torch.ones(20, 2), 5):
            run.backward(loss := model(batch.data).square().mean(), model)
            optimizer.step()
            run.log(loss=loss)
"""


def test_a_loop_of_ones_own_is_followed_on_two_ranks_and_when_it_goes_on(tmp_path):
    script, run = tmp_path / "own.py", tmp_path / "run"
    script.write_text(OWN_LOOP.replace("TRACK", repr({"to": TRACKER, "project": "loops"})))
    for epochs in ("2", "3"):
        ranks = scripts.run(script, epochs, world_size=2, folder=tmp_path)
        assert ranks.output().count("own_tracker: https://tracker.example/the-run") == 1
    assert sent(run) == expected(run)
    assert [line["project"] for line in what(run, "start")] == ["loops"] * 2
    assert [line["status"] for line in what(run, "finish")] == ["completed"] * 2
    for track, says in (
        ("wandbb", "Did you mean 'wandb'?"),
        ({"lr": 3}, "track.*'lr' is not known"),
    ):
        script.write_text(OWN_LOOP.replace("TRACK", repr(track)))
        assert re.search(says, scripts.refused(script, "3", folder=tmp_path))


def test_a_tracker_named_as_a_module_has_checkpoints_and_no_password(here, monkeypatch):
    (here.folder / "ours").mkdir()
    (here.folder / "ours" / "__init__.py").touch()
    (here.folder / "ours" / "logs.py").write_text(Path(TRACKER).read_text())
    monkeypatch.chdir(here.folder)  # where a module is looked for
    link = {"TRACKER_LINK": "http://me:pa55word@host/the-run"}
    ranks = here.train("--track ours.logs --track-checkpoints --max-steps 8", **link)
    files = [line["file"] for line in what(here.run, "checkpoint")]
    assert files == ["checkpoint_step_4.pt", "checkpoint_step_8.pt"]
    assert read_json(here.run / "tracking" / "ours.logs.json")["online"]["finished"]
    assert "http://host/the-run" in ranks.output()
    assert "http://host/the-run" in send(here.run, here.folder, code=2, to="ours.logs")
    written = [path for path in here.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if b"pa55word" in path.read_bytes()]


def test_a_killed_and_resumed_run_is_one_run_with_each_step_once(here, uninterrupted):
    run = here.run
    tiny.set_pace(here.recipe, 0.02)  # so that the tracker sees more than the checkpoint
    here.train(*TRACK, "--epochs 1")
    kill = Fault(point="after a step", nth=25)
    here.train("--resume --epochs 6", target=run, faults=(kill,), code=-signal.SIGKILL)
    tiny.set_pace(here.recipe, 0)
    # At once: the process of the first execution may still be closing.
    here.resume()
    assert len([r for r in tiny.all_records(run) if r["event"] == "resume"]) == 2
    tiny.assert_same_training(run, uninterrupted, 0)
    assert [line["known"] for line in what(run, "start")] == [None, "the run", "the run"]
    statuses = [line["status"] for line in what(run, "finish")]
    assert statuses == ["completed", "killed", "completed"], "the second left no result of its own"
    steps = [step for step, _, _ in sent(run)["train"]]
    assert steps == list(range(1, tiny.STEPS + 1))
    assert losses(sent(run)) == losses(expected(run)), "superseded steps were the same to the bit"
    assert not children_of(run)


def losses(series):
    return [values["train/loss"] for _, _, values in series["train"]]


def test_a_resumed_run_goes_on_at_its_trackers_and_flags_change_them(here):
    run = here.run
    here.train(*TRACK, "--epochs 1")
    here.resume("--epochs 2 --track none")
    assert len(what(run, "start")) == 1
    here.resume(*TRACK, "--epochs 3 --track-project other")
    starts = what(run, "start")
    assert [line["project"] for line in starts] == ["tiny", "other"]
    assert [line["known"] for line in starts] == [None, "the run"]
    for series in ("train", "epoch", "validation"):
        assert sent(run)[series] == expected(run)[series], "what was missed was made up"


# Each group in one training, with a tracker for each fault: those that end by themselves, and
# those that end by their time limit.
FAULTS = {
    ("import:raise", "start:exit", "start:mute", "record:raise", "record:kill"): "",
    ("import:hang", "start:hang", "record:hang"): "--track-timeout 2",
}


@pytest.mark.parametrize(("faults", "flags"), FAULTS.items(), ids=["end", "hang"])
def test_whatever_trackers_do_the_training_is_the_same(here, faults, flags, uninterrupted):
    trackers, run = here.faulty(faults), here.run
    names = ",".join(map(str, trackers.values()))
    ranks = here.train("--track", Path(names), flags, TRACKER_FAULT="planted")
    tiny.assert_same_training(run, uninterrupted, 0)
    output = " ".join(ranks.output().split())
    assert "Traceback" not in output
    for fault, (name, path) in zip(faults, trackers.items(), strict=True):
        (told,) = re.findall(rf"warning {name} failed: (.*?)events.jsonl is complete", output)
        assert f"--to {path}" in output
        (count,) = re.findall(r"It has ([\d,]+) of ([\d,]+) records\. $", told)
        has, of = (int(number.replace(",", "")) for number in count)
        assert of > 0
        assert has == 0 or not fault.startswith(("import", "start"))
        if fault.endswith("raise"):
            assert f"ConnectionError: the service has gone at {fault.split(':')[0]}" in told
        if fault.endswith("hang"):
            assert " 2 s. " in told
        assert not children_of(run, name)
    assert send(run, here.folder, to=names).count("https://tracker.example/the-run") == len(faults)
    for name in trackers:
        assert sent(run, name) == expected(run), "once, whatever came of the first time"


@pytest.mark.parametrize("flags", ["--track-offline", ""], ids=["writes files", "starts"])
def test_a_slow_tracker_that_only_writes_files_or_still_starts_is_waited_for(here, flags):
    """Its start waits for the last record of the training, which therefore waits for none."""
    ranks = here.train(*TRACK, flags, TRACKER_FAULT="start:wait", end_s=0.0)
    assert "failed" not in ranks.output()
    assert sent(here.run) == expected(here.run)


def test_a_tracker_that_is_killed_within_the_run_has_its_part_once(here):
    tiny.set_pace(here.recipe, 0.02)  # so that there is a second time to hand over
    ranks = here.train(*TRACK, TRACKER_FAULT="later record:kill")
    assert "signal 9" in ranks.output()
    assert 0 < len(sent(here.run)["train"]) < tiny.STEPS
    send(here.run, here.folder)
    assert sent(here.run) == expected(here.run)


def test_a_signal_ends_the_training_without_its_hanging_trackers(here):
    tiny.set_pace(here.recipe, 0.02)
    stop = Fault(point="after a step", nth=20, signum=signal.SIGTERM)
    trackers = here.faulty(["start:hang", "finish:hang"])
    track = ("--track", Path(",".join(map(str, trackers.values()))))
    ranks = here.start(*track, faults=(stop,), TRACKER_FAULT="planted")
    # The trackers' own limit is 120 s, longer than this wait.
    assert ranks.wait(110) == [128 + signal.SIGTERM]
    assert read_json(here.run / "result.json")["status"] == "stopped"
    for name in trackers:
        assert ranks.output().count(f"warning {name} failed: ") == 1
        assert not children_of(here.run, name)
    send(here.run, here.folder, to=trackers["finish_hang"])
    assert sent(here.run, "finish_hang") == expected(here.run)


def test_a_run_that_is_refused_leaves_no_process_and_no_file(here):
    here.change("options.samples", "options.nothing")
    ranks = here.train(*TRACK, code=2)
    assert not here.run.exists()
    assert not own_tracker.lines(here.run)
    assert ranks.output().count("samestep: ") == 1


def test_a_run_that_fails_is_closed_as_failed(here):
    here.change("(outputs, targets)\n", "(outputs, targets) / 0\n")
    here.train(*TRACK, code=2)
    tiny.until(lambda: bool(what(here.run, "finish")))
    assert what(here.run, "finish")[0]["status"] == "failed"
    tiny.until(lambda: not children_of(here.run))


FILES = """
import json, os, signal
from samestep.show.tracking import Started
COUNTS_AT_END = True
def start(run):
    path = run.folder / f"part-{len(list(run.folder.iterdir()))}.jsonl"
    return Started(client=path.open("w"))
def record(client, entries):
    for entry in entries: client.write(json.dumps([entry.event, entry.step]) + "\\n")
    client.flush()
    if os.environ.get("KILLED"): os.kill(os.getpid(), signal.SIGKILL)
def finish(client, result): client.close()
"""


def test_files_that_a_killed_tracker_did_not_close_are_written_anew(here):
    folder = here.run / "tracking" / "files"
    here.train("--track", here.tracker("files", FILES), "--track-offline --epochs 1")
    first = (folder / "part-0.jsonl").read_text()
    assert first
    here.resume("--epochs 2", KILLED="1")
    assert len(list(folder.iterdir())) == 2
    here.resume("--epochs 3")
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == ["part-0.jsonl", "part-1.jsonl"]
    assert parts[0].read_text() == first, "what was closed stays"
    lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [step for event, step in lines if event == "step"] == list(range(1, 34))


TAKES = "def record(client, entries): pass\ndef finish(client, result): pass\n"
TALKS = """
import os
key = os.environ["MY_API_KEY"]
def start(run):
    print("the key is", key)
    raise ValueError("refused: " + key)
"""


def test_what_a_tracker_says_of_a_key_is_hidden_and_a_wrong_answer_named(here):
    talks = here.tracker("talks", TALKS + TAKES)
    wrong = here.tracker("wrong", "def start(run): return 7\n" + TAKES)
    planted = "hunter2-the-planted-key"
    ranks = here.train("--track", Path(f"{talks},{wrong}"), MY_API_KEY=planted)
    assert "start() returned int" in ranks.output()
    assert "ValueError: refused: …" in ranks.output()
    assert planted not in ranks.output()
    assert "the key is …" in (here.run / "tracking" / "talks.log").read_text()
    held = [name for name, content in tiny.files(here.run).items() if planted.encode() in content]
    assert not held
