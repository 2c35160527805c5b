"""The code of two runs side by side: copies as a whole, or the one file that a run keeps."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.reporting.code_changes import CodeChange, code_changes
from samestep.reporting.collect import collect
from samestep.reporting.comparison import compare_runs
from samestep.reporting.comparison_text import as_table, lines
from samestep.reporting.page import render
from samestep.run.code_copy import copy_code, find_code
from tests.reporting.made_runs import write_run


def with_code(run: Path, **files: bytes) -> Path:
    """Let a run have a copy of a folder with these files; train.py is the one that ran."""
    folder = run.with_name(f"{run.name}-code")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    copy_code(find_code(folder / "train.py"), write_run(run))
    return run


def summary(changes: list[CodeChange] | None) -> list[tuple[str, str, int, int]]:
    return [(one.file, one.change, one.added, one.removed) for one in changes or ()]


@pytest.fixture
def pair(tmp_path):
    same = {"same.py": b"x\n", "lib/same.py": b"y\n"}
    old = {"train.py": b"a\nb\nc\n", "gone.py": b"1\n", "w.bin": b"\0\1"}
    new = {"train.py": b"a\nB\nc\nd\n", "new.py": b"1\n2\n", "w.bin": b"\0\2"}
    return with_code(tmp_path / "A", **same, **old), with_code(tmp_path / "B", **same, **new)


def test_each_file_that_differs_is_told_also_where_a_run_keeps_one_alone(pair, tmp_path):
    found = code_changes(*pair)
    assert summary(found) == [
        ("gone.py", "gone", 0, 1),
        ("new.py", "new", 2, 0),
        ("train.py", "edited", 2, 1),
        ("w.bin", "edited", 0, 0),
    ]
    assert found[2].diff.splitlines()[:2] == ["--- a/train.py", "+++ b/train.py"]
    assert {"-b", "+B", "+d"} <= {*found[2].diff.splitlines()}
    assert found[3].diff == ""
    assert code_changes(pair[0], pair[0]) == []
    # Data that is only linked is no code.
    (pair[1] / "code" / "data").symlink_to(pair[0])
    (pair[1] / "code" / "__pycache__").mkdir()
    (pair[1] / "code" / "__pycache__" / "x.pyc").touch()
    assert summary(code_changes(*pair)) == summary(found)
    (tmp_path / "C").mkdir()
    assert code_changes(pair[0], tmp_path / "C") is None
    (tmp_path / "C" / "recipe.py").write_text("a\nb\n")
    assert summary(code_changes(pair[0], tmp_path / "C")) == [("train.py", "edited", 0, 1)]
    assert summary(code_changes(tmp_path / "C", pair[0])) == [("train.py", "edited", 1, 0)]
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "script.py").write_text("a\nb\n")
    assert code_changes(tmp_path / "C", tmp_path / "D") == []


def test_compare_and_the_report_show_the_difference(tmp_path, pair):
    runs = [*pair, write_run(tmp_path / "C")]
    found = compare_runs(runs)
    screen = [line.split() for line in lines(found)]
    assert ["train.py", "–", "+2", "-1", "?"] in screen
    assert ["+B"] in screen
    told = as_table(found)["code"]
    assert [one["run"] for one in told] == ["B", "C"]
    assert [one["file"] for one in told[0]["files"]] == ["gone.py", "new.py", "train.py", "w.bin"]
    assert told[1]["files"] is None
    page = render(collect(runs)).html
    assert "\n+B\n" in page
    assert "code-B" in page
    assert "code-C" not in page


def test_a_long_difference_is_left_out_of_the_screen_and_is_in_the_json(tmp_path):
    many = "".join(f"{n}\n" for n in range(99))
    runs = [with_code(tmp_path / "A", **{"train.py": b""})]
    runs += [with_code(tmp_path / "B", **{"train.py": many.encode()})]
    found = compare_runs(runs)
    assert "+77" not in [*lines(found)]
    assert "\n+77" in as_table(found)["code"][0]["files"][0]["diff"]


@settings(max_examples=30)
@given(st.tuples(*[st.binary(min_size=1, max_size=20)] * 2))
def test_lines_added_and_removed_account_for_the_length_of_files(tmp_path_factory, contents):
    folder = tmp_path_factory.mktemp("runs")
    for name, content in zip("AB", contents, strict=True):
        (folder / name).mkdir()
        (folder / name / "recipe.py").write_bytes(content)
    found = code_changes(folder / "A", folder / "B")
    assert bool(found) == (contents[0] != contents[1])
    for one in found:
        if one.diff:
            before, after = (len(content.removesuffix(b"\n").split(b"\n")) for content in contents)
            assert one.added - one.removed == after - before
