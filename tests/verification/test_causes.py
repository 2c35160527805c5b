"""Each cause is planted in a small recipe, and found with the right name by real ranks."""

import sys
from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.prove.verification import causes
from samestep.prove.verification.rows import one_writer
from tests.command_line import typed
from tests.verification import planted
from tests.verification.forked import check, differing, gathered, verified

# What is planted → the rows that must differ, each with its cause. No others may. What one process
# finds out about a recipe is in test_experiments.py, and how rows are judged in test_all_rows.py:
# what those show needs no ranks here.
THOROUGH = {
    "RANK_IN_FORWARD": dict.fromkeys(
        ("2 ranks", "fp32", "accumulation", "stop and resume", "fsdp", "processes", "metrics"),
        causes.FORWARD_BY_RANK.name,
    ),
    "COUNTER": dict.fromkeys(
        ("accumulation", "stop and resume", "state", "one device"), causes.OUTSIDE_MODULE.name
    ),
}
QUICK = {
    "EMA": dict.fromkeys(("2 ranks", "samples apart"), causes.BUFFERS.name),
    "OTHER_WEIGHTS": dict.fromkeys(
        ("2 ranks", "processes", "metrics"), causes.INITIAL_WEIGHTS.name
    ),
    # The training itself refuses such data, with that reason.
    "ORDER": {"2 ranks": None, "order": causes.OTHER_ORDER.name},
    # Each rank may write files of its own.
    "METRIC_OVER_RANKS PYTHONS_RANDOM WRITES_OF_ITS_OWN": {
        "metrics": causes.OVER_RANKS.name,
        "state": causes.OUTSIDE_MODULE.name,
    },
}


@pytest.mark.parametrize("names", [*THOROUGH, *QUICK])
def test_what_is_planted_is_found_and_named_and_nothing_else(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "".join(getattr(planted, name) for name in names.split())
    recipe = planted.write(tmp_path, text, name=f"p_{names.split()[0].lower()}.py")
    found = verified(recipe, folder=tmp_path / "ranks", quick=names in QUICK)
    assert differing(found) == {**THOROUGH, **QUICK}[names]


def test_each_training_has_the_validation_that_a_schedule_follows(tmp_path):
    recipe = planted.write(tmp_path, planted.FOLLOWS_VALIDATION, name="p_follows.py")
    found = verified(recipe, folder=tmp_path / "ranks", sizes=(1,))
    assert found.same
    assert {check(found, name).passed for name in ("accumulation", "stop and resume")} == {True}


def test_batch_norm_and_a_rounding_optimizer_are_the_same_shared_out(tmp_path):
    recipe = planted.write(tmp_path, planted.BY_FORWARD, name="p_by_forward.py")
    found = verified(recipe, folder=tmp_path / "ranks")
    assert differing(found) == {}
    assert check(found, "fsdp").difference < 1e-12


def test_a_built_in_batch_size_and_a_loss_bent_for_few_samples_fail_in_the_uneven_batch(tmp_path):
    recipe = planted.write(tmp_path, planted.FIXED_SHAPE, name="p_fixed.py")
    report = verified(recipe, folder=tmp_path / "ranks", batch=8)
    assert differing(report) == {"one process": causes.UNEVEN_BATCH.name}
    (found,) = report.checks
    assert found.first_step == report.facts.size.uneven_step
    assert planted.line_of(recipe, "reshape") in found.cause.why
    recipe = planted.write(tmp_path, planted.LAST_BENT, name="p_bent.py")
    report = verified(recipe, folder=tmp_path / "ranks", batch=8, quick=True)
    assert differing(report) == dict.fromkeys(("2 ranks", "last batch"), causes.UNEVEN_BATCH.name)
    assert check(report, "2 ranks").first_step == report.facts.size.uneven_step


def test_branches_train_the_same_and_parameters_that_only_some_steps_use_are_named(tmp_path):
    recipe = planted.write(tmp_path, planted.BRANCH, name="p_branch.py")
    found = verified(recipe, "--find-unused", folder=tmp_path / "ranks", batch=8, quick=True)
    assert differing(found) == {}
    recipe = planted.write(tmp_path, planted.UNUSED_AT_TIMES, name="p_times.py")
    found = check(verified(recipe, folder=tmp_path / "ranks", quick=True), "2 ranks")
    assert found.cause.name == causes.UNUSED.name
    assert found.failure is not None


def test_draws_and_batch_norm_are_found_apart_and_may_be_accepted(tmp_path):
    recipe = planted.write(tmp_path, planted.BOTH, name="p_both.py")
    left = gathered(recipe, folder=tmp_path / "ranks", quick=True)
    assert differing(left.judged()) == {
        "BatchNorm": causes.BATCHNORM.name,
        "dropout": causes.DROPOUT.name,
    }
    report = left.judged(accept=("batchnorm", "dropout"))
    assert report.same
    for name in ("BatchNorm", "dropout"):
        assert check(report, name).status == "accepted"
        assert check(report, name).cause.why


def test_files_and_lines_that_every_rank_writes_are_told(disk, monkeypatch, tmp_path):
    monkeypatch.chdir(disk)
    both = planted.WRITES + 'open("notes.txt", "w").close()\n'
    recipe = planted.write(disk, both, name="p_writes.py")
    report = verified(recipe, folder=disk / "ranks", quick=True)
    assert differing(report) == {one_writer.ONE_WRITER.name: "every rank writes"}
    assert "and 1 more file " in check(report, one_writer.ONE_WRITER.name).cause.why
    recipe = planted.write(tmp_path, planted.PRINTS, name="p_prints.py")
    report = verified(recipe, folder=tmp_path / "ranks", quick=True)
    found = check(report, one_writer.ONE_WRITER.name)
    assert (report.same, found.status) == (True, "note")
    assert planted.line_of(recipe, "print(") in found.cause.why
    assert "'reading data'" in found.cause.why


def test_without_float64_what_rounding_does_is_measured_and_noise_of_a_thousandth_is_seen(tmp_path):
    recipe = planted.write(tmp_path, planted.SINGLE, name="p_single.py")
    report = verified(recipe, folder=tmp_path / "ranks", quick=True)
    assert differing(report) == {"dropout": causes.DROPOUT.name}
    assert report.facts.exact == "fp32"
    assert "TypeError" in report.facts.inexact
    noise, measure = check(report, "dropout"), check(report, "rounding")
    assert noise.difference < 1e-2, "no more than fp32 may be off after all"
    assert noise.tolerance == check(report, "2 ranks").tolerance == measure.tolerance <= 1e-4


def test_a_killed_rank_fails_its_row_and_a_nan_loss_needs_no_checkpoint(tmp_path):
    text = """
import os, signal
def loss(outputs, targets):
    if os.environ.get("RANK") == "1": os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, targets)
"""
    recipe = planted.write(tmp_path, text, name="p_killed.py")
    report = verified(recipe, folder=tmp_path / "ranks", quick=True)
    assert not check(report, "2 ranks").passed
    assert check(report, "one process").passed
    text = """
def loss(outputs, targets): return outputs.sum() * float("nan")
"""
    recipe = planted.write(tmp_path, text, name="p_nan.py")
    with pytest.raises(UserError, match="step 1") as told:
        verified(recipe, folder=tmp_path / "ranks")
    assert "NaN" in str(told.value)
    assert "checkpoint" not in str(told.value)


def test_nothing_is_left_behind_by_a_training_that_is_the_same(tmp_path, monkeypatch):
    home = tmp_path / "temporary"
    home.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(home))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    recipe = planted.write(tmp_path, planted.OWN_FORWARD, name="p_left.py")
    report = verified(recipe, folder=tmp_path / "ranks")
    assert differing(report) == {}
    assert check(report, one_writer.ONE_WRITER.name).status == "same"
    assert not list(home.iterdir())
    assert not list(Path().iterdir())


# What a line does → the file that is its doing, if one is.
WRITES = {
    "open('opened.txt', 'w').close()": "opened.txt",
    "pathlib.Path('path.txt').write_text('x')": "path.txt",
    "numpy.save('array', [1])": "array.npy",
    "torch.save({}, 'weights.pt')": "weights.pt",
    "os.rename('there.txt', 'moved.txt')": "there.txt",
    "open('moved.txt').read()": None,
    "os.makedirs('made/in', exist_ok=True)": None,
    "open('new.txt', 'x').close()": None,
    "import writes_when_imported": None,
    "tempfile.gettempdir()": None,
    "tempfile.NamedTemporaryFile().close()": None,
    "cached.write()": None,
}
WRITING = """
import os, pathlib, sys, tempfile
import numpy, torch
from samestep import errors
from samestep.prove.verification.rows import one_writer
python, library = (str(pathlib.Path(name).absolute()) + os.sep for name in ("python", "library"))
one_writer._PYTHON += (python,)
one_writer._LIBRARIES += (library,)
errors._LIBRARIES = (*errors._LIBRARIES, python, library)
sys.path += [python, library]
import cached
found = one_writer.watch_output(pathlib.Path("elsewhere").absolute())
"""
REPORT = """
for path, line in found.written.items(): print(line, pathlib.Path(path).name, file=sys.__stdout__)
"""


@pytest.fixture(scope="module")
def told(disk) -> dict[str, list[str]]:
    """Run all lines in one process; return for each what it is said to have written."""
    for name in ("python/writes_when_imported.py", "library/cached.py"):
        (disk / name).parent.mkdir()
    (disk / "there.txt").write_text("x")
    (disk / "python/writes_when_imported.py").write_text("open('import.txt', 'w').close()\n")
    (disk / "library/cached.py").write_text("def write(): open('cache.txt', 'w').close()\n")
    script = disk / "script.py"
    script.write_text(WRITING + "\n".join(WRITES) + REPORT)
    done = typed(sys.executable, script.name, folder=disk, TMPDIR=str(disk))
    assert (disk / "import.txt").is_file()
    assert (disk / "cache.txt").is_file()
    lines = script.read_text().splitlines()
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        place, name = line.split()
        file, number = place.split(":")
        assert file == "script.py"
        found.setdefault(lines[int(number) - 1], []).append(name)
    return found


@pytest.mark.xdist_group("one_writer")  # one worker runs the process that they look at
@pytest.mark.parametrize("line", WRITES)
def test_a_write_is_the_doing_of_the_line_that_asked_for_it(line, told):
    expected = WRITES[line]
    assert told.get(line, []) == ([expected] if expected else [])
