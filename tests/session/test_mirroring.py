"""A run that is copied to a store: whatever is cut, what the store's index names is whole there."""

import itertools
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import samestep
from samestep.base.run import index as indexes
from samestep.base.run.index import Entry, Index, Retention, read_index, verify
from samestep.base.run.store import INDEX, Store
from samestep.base.settings import Settings
from samestep.shell.api.call import ScreenFile
from samestep.show import mirroring
from tests import command_line
from tests.command_line import read_json, train_here
from tests.needs import needs
from tests.tiny import assert_same_training, events, set_pace, sha256, until, write_recipe


class CutError(Exception):
    """The copying ends here, as by SIGKILL."""


class CutStore(Store):  # a store that can be asked a number of times; then half a file is there
    left = 0

    def _key(self, name):
        key = super()._key(name)
        if not CutStore.left:
            if name.endswith((".pt", ".distcp")):
                self._make_folder(key)
                self._files.pipe_file(key, b"half")
            raise CutError
        CutStore.left -= 1
        return key


def grow(run: Path, index: Index, step: int) -> Index:
    """Let a run announce a checkpoint with a part, and forget the oldest of three."""
    name, folder = f"checkpoint_step_{step}.pt", run / "checkpoints"
    part = f"checkpoint_step_{step}.shards/__0_0.distcp"
    (folder / part).parent.mkdir(parents=True)
    for one in (name, part):
        (folder / one).write_text(f"the content of {one}")
    with (run / "events.jsonl").open("a") as file:
        file.write(f'{{"event": "checkpoint", "step": {step}}}\n')
    digest, files = sha256(folder / name), {part: sha256(folder / part)}
    entry = Entry(path=name, step=step, epoch=1, sha256=digest, metric=step % 2 * step, files=files)
    return indexes.announce(folder, index, entry, Retention(newest=2))


def test_wherever_the_copying_is_cut_the_index_names_only_what_is_whole(tmp_path, monkeypatch):
    """The best there gets no worse, either; the next process copies, and removes, the rest."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    monkeypatch.setattr(mirroring, "Store", CutStore)

    def copied() -> None:
        mirror = mirroring.Mirror(Settings(mirror=copy.as_uri(), keep_newest=2), print, bool)
        mirror._run = run
        mirror._copy()

    for cut in itertools.count():
        for folder in (run, copy):
            shutil.rmtree(folder, ignore_errors=True)
        run.mkdir()
        (run / "events.jsonl").write_text('{"event": "start"}\n')
        index, CutStore.left, whole, best = Index(), cut, True, -1
        for step in range(1, 8, 2):
            index = grow(run, grow(run, index, step), step + 1)
            try:
                copied()
            except CutError:
                whole, CutStore.left = False, 1000
            there = read_index(copy / "checkpoints").checkpoints
            for entry in there:
                verify(copy / "checkpoints", entry)
            worse, best = best, max((entry.metric for entry in there), default=-1)
            assert best >= worse
        CutStore.left += 1000
        copied()
        assert read_index(copy / "checkpoints").checkpoints == index.checkpoints
        assert (copy / "events.jsonl").read_text() == (run / "events.jsonl").read_text()
        if whole:
            break
    assert cut > 35
    files = {file.name for file in (copy / "checkpoints").glob("*.pt")}
    assert files == {entry.path for entry in index.checkpoints}
    behind = indexes.index_text(replace(index, checkpoints=index.checkpoints[:-1]))
    (run / "checkpoints/index.json").write_text(behind)
    copied()
    assert read_index(copy / "checkpoints").checkpoints == index.checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:  # the run that nothing disturbed, next to its recipe
    folder = tmp_path_factory.mktemp("whole")
    train_here(str(write_recipe(folder)), "--run-dir", str(folder / "run"))
    return folder / "run"


def test_a_run_continues_from_its_copy_elsewhere_with_the_same_bits(whole, here, capsys):
    """Though the newest checkpoint there was damaged; and it is copied on."""
    recipe, store = str(whole.parent / "tiny.py"), here / "store" / "a"
    train_here(recipe, "--run-dir", "b", "--max-steps", "29", "--mirror", store.as_uri())
    for name in ("events.jsonl", "result.json", "checkpoints/index.json", "recipe.py"):
        assert (store / name).read_bytes() == (here / "b" / name).read_bytes()
    newest = store / "checkpoints/checkpoint_step_29.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    train_here(recipe, "--resume", store.as_uri())
    assert "checkpoint_step_29.pt is damaged" in " ".join(capsys.readouterr().err.split())
    assert_same_training(here / "runs/a", whole, tolerance=0)
    assert read_json(store / "result.json") == read_json(here / "runs/a/result.json")
    runs = here / "runs/a", store
    kept, copied = ({e.path for e in read_index(r / "checkpoints").checkpoints} for r in runs)
    assert kept < copied, "what was not fetched stays"


def test_a_store_that_takes_nothing_ends_no_training_and_the_result_says_what_it_lacks(
    whole, here, monkeypatch
):
    monkeypatch.setattr(mirroring, "QUIET_S", 0.2)
    store = "file:///dev/null/a"
    said = train_here(str(whole.parent / "tiny.py"), "--run-dir", "a", "--mirror", store)
    assert said.count(f"not copied to {store}") == 1
    lacks = read_json(here / "a/result.json")["mirror"]
    assert "Not a directory" in lacks["why"]
    assert {"events.jsonl", "checkpoints/checkpoint_epoch_6.pt"} <= {*lacks["missing"]}


def test_an_address_with_a_secret_is_refused_without_a_word_of_it(here, refused, monkeypatch):
    for place in ("s3://me:hidden@b/a", "s3://b/a?token=hidden", "me:hidden@host"):
        assert "hidden" not in refused("train", "spiral", "--mirror", place)
    assert "hidden" not in refused("train", "spiral", "--resume", "s3://me:hidden@b/a")
    assert "outlives" in refused("train", "spiral", "--mirror", "memory://a/b")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "pip install 'samestep[mirror]'" in refused("train", "spiral", "--mirror", "s3://b/a")
    assert [*here.iterdir()] == []


def test_a_new_run_leaves_another_ones_copy_alone_and_a_resume_a_run_that_is_behind(here, refused):
    store, spiral = (here / "store").as_uri(), ("spiral", "--run-dir")
    train_here(*spiral, "a", "--max-steps", "2", "--mirror", store)
    before = (here / "store" / INDEX).read_bytes()
    assert "--mirror file:" in refused("train", *spiral, "b", "--mirror", store)
    train_here("a", "--run-dir", "b", "--max-steps", "1")
    assert "step 2" in refused("train", *spiral, "b", "--resume", store)
    said = train_here("b", "--resume", "--max-steps", "3", "--mirror", store)
    assert "it holds another run" in " ".join(said.split())
    assert (here / "store" / INDEX).read_bytes() == before


def test_a_loop_of_ones_own_is_copied_too_and_must_be_fetched_elsewhere(here, capfd):
    with samestep.open_run("a", mirror=(here / "store").as_uri()) as run:
        for _ in run.epochs(2, state={"model": torch.nn.Linear(1, 1)}):
            for _ in run.batches(torch.arange(4.0), global_batch_size=2):
                run.log(loss=1.0)
    for name in ("events.jsonl", INDEX):
        assert (here / "store" / name).read_bytes() == (here / "a" / name).read_bytes()
    with pytest.raises(SystemExit):
        samestep.open_run("b", resume=True, mirror=(here / "store").as_uri()).__enter__()
    assert f"{here / 'b'}/', recursive=1" in capfd.readouterr().err


def test_the_file_of_records_for_the_caller_also_takes_what_is_told_at_the_very_end(tmp_path):
    screen = ScreenFile(tmp_path / "told")
    for event in ("stop", "tracker"):
        with screen:
            screen.show_message({"event": event})
    assert (tmp_path / "told").read_text().count("event") == 2


@needs("moto")
@needs("s3fs")
def test_what_s3_has_of_a_killed_run_is_whole_though_the_server_was_away(whole, here):
    """The server ends in the middle, the training goes on; once it is back, all is copied."""
    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._port = server.get_host_and_port()[1]  # stopped, it keeps what it has
    at = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server._port}", "AWS_MAX_ATTEMPTS": "1"}
    at |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    store, run = "s3://bucket/a", here / "one"
    bucket = s3_backends["123456789012"]["aws"].create_bucket("bucket", "us-east-1")

    def step_there() -> int:
        index = bucket.keys.get(f"a/{INDEX}")
        return 0 if index is None else indexes.parse_index(index.value, "").last.step

    recipe = write_recipe(here)
    set_pace(recipe, 0.2)
    begin = ("train", str(recipe), "--run-dir", str(run), "--mirror", store)
    ranks = command_line.start(*begin, folder=here, environment=at)
    until(step_there, ranks)
    server.stop()
    step = read_index(run / "checkpoints").last.step
    until(lambda: read_index(run / "checkpoints").last.step > step + 4, ranks)
    server.start()
    until(lambda: step_there() > step + 4, ranks)
    ranks.processes[0].kill()
    ranks.wait()
    set_pace(recipe, 0)
    # Not in this process: the connections of s3fs stay open until it ends.
    again = ("train", str(recipe), "--resume", store, "--run-dir", str(here / "a"))
    command_line.run(*again, folder=here, environment=at)
    assert events(here / "a", "resume")[0]["step"] > step + 4
    assert_same_training(here / "a", whole, tolerance=0)
    assert step_there() == 66
    server.stop()
