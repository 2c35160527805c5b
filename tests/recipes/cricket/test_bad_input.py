"""What is wrong with matches or with the machine is one message, also where a user meets it."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile

import pytest

from samestep import read_records
from samestep.recipes.cricket.synthetic import documents
from tests import tiny
from tests.command_line import one_message, run, start
from tests.cricket_files import encoded, match, write
from tests.needs import needs

pytestmark = needs("torch_geometric")

SMALL = ("--balls-per-match", "6", "--width", "8", "--threads", "1", "--max-steps", "1")
SMALL += ("--batch-size", "4")


def command(source, folder, *flags):
    places = ("--data-dir", str(source), "--cache-dir", str(folder / "kept"))
    return ("train", "cricket", *SMALL, "--no-trees", *places, *flags)


def dated(number, **more):
    return match(date=f"2024-{number % 12 + 1:02}-{number % 28 + 1:02}", **more)


def notes_of(path):
    (start,) = (record for record in read_records(path) if record["event"] == "start")
    return start["notes"]


def nothing(folder):
    return write(folder / "m", {"readme.txt": b"nothing"}), ".json"


def truncated(folder):
    path = folder / "m.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, file in documents(4, seed=0):
            entry = tarfile.TarInfo(name)
            entry.size = len(file)
            archive.addfile(entry, io.BytesIO(file))
    path.write_bytes(path.read_bytes()[:3000])
    return path, "truncated"


def leading_out(folder):
    path = folder / "m.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../1.json", encoded(match()))
    return path, "../../1.json"


def one_bad(folder):
    cards = {f"{number:04}.json": dated(number) for number in range(200)}
    return write(folder / "m", cards | {"0123.json": b"{'"}), "--skip-bad 1"


def unknown_version(folder):
    return write(folder / "m", {"1.json": match(version="7.0.0")}), "7.0.0"


def no_innings(folder):
    return write(folder / "m", {"1.json": {**match(), "innings": []}}), "no innings"


def one_date(folder):
    return write(folder / "m", {f"{n}.json": match() for n in range(5)}), "--split-by random"


@pytest.mark.parametrize(
    "make", [nothing, truncated, leading_out, one_bad, unknown_version, no_innings, one_date]
)
def test_matches_that_cannot_be_used_are_one_message(tmp_path, refused, make):
    source, told = make(tmp_path)
    message = refused(*command(source, tmp_path, "--run-dir", str(tmp_path / "run")))
    assert source.name in message or make is one_date
    assert told in message
    assert not (tmp_path / "run").exists()


def test_without_geometric_it_says_what_to_install(tmp_path):
    program = (
        "import sys; sys.modules['torch_geometric'] = None\n"
        "from samestep.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *("train", "cricket", "--synthetic")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    message = one_message(done.returncode, done.stdout + done.stderr)
    assert "pip install 'samestep[cricket]'" in message


def test_what_another_version_has_kept_is_read_anew_and_that_is_said_once(tmp_path):
    cards = {f"{number}.json": dated(number) for number in range(12)}
    source = write(tmp_path / "m", {**cards, "none.json": {**match(), "innings": []}})
    said = []
    for number in range(3):
        path = tmp_path / f"run-{number}"
        run(*command(source, tmp_path, "--run-dir", str(path)), folder=tmp_path / "out")
        said.append(len(notes_of(path)))
        (kept,) = (tmp_path / "kept").glob("*.npz")
        if number == 0:  # the second part of its name is of the version and of the files
            kept.rename(kept.with_name(f"{kept.name.partition('-')[0]}-{'0' * 16}.npz"))
    # That a match has no innings, and that the warm-up outlasts the run, is said each time.
    assert said == [2, 3, 2]


def test_jobs_that_read_at_once_and_one_that_was_killed_leave_one_whole_file(tmp_path):
    """A pipe in the folder holds the reading up, so that the job is killed within it."""
    cards = {f"{number:04}.json": dated(number) for number in range(200)}
    source = write(tmp_path / "m", cards)
    os.mkfifo(source / "last.json")
    os.utime(source / "last.json", (0, 0))
    killed = start(*command(source, tmp_path), folder=tmp_path / "out")
    tiny.until(lambda: len(list((tmp_path / "kept").glob("*.parts/0*.npz"))) == 3, killed)
    killed.kill()
    assert killed.wait() == [-signal.SIGKILL]
    assert not list((tmp_path / "kept").glob("*.npz"))
    (source / "last.json").unlink()
    (source / "last.json").touch()
    os.utime(source / "last.json", (0, 0))
    both = [
        start(
            *command(source, tmp_path, "--run-dir", str(tmp_path / name), "--skip-bad", "1"),
            folder=tmp_path / "out",
        )
        for name in ("one", "two")
    ]
    assert [job.wait() for job in both] == [[0], [0]], [job.output() for job in both]
    assert len(list((tmp_path / "kept").glob("*.npz"))) == 1
    assert not list((tmp_path / "kept").glob("*.parts"))
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert results[0]["test"] == results[1]["test"]
