"""`samestep.check`: the report of the verb, from Python."""

import pytest

import samestep
from tests.checking.planted import BASE, forked, planted


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    monkeypatch.setattr("samestep.checking.check_script.start_processes", forked)


def test_a_script_is_checked_from_python_and_its_report_is_data(here):
    source = planted(
        ("range(3)", "range(int(sys.argv[1]))"), ("import os\n", "import os\nimport sys\n")
    )
    (here / "train.py").write_text(source)
    report = samestep.check("train.py", args=[1], nproc=2)
    assert isinstance(report, samestep.CheckReport)
    assert (report.findings, report.exit_code, report.steps, report.ranks) == ([], 0, 4, 2)
    assert "4 steps" in str(report)


def test_what_cannot_be_checked_raises_one_error(here):
    (here / "train.py").write_text(BASE)
    for script, more in ((3, {}), ("train.py", {"steps": 0}), ("no_such", {"module": True})):
        with pytest.raises(samestep.UserError):
            samestep.check(script, **more)
    for text in ("recipe = samestep.Recipe()", "samestep.open_run('x')"):
        (here / "mine.py").write_text(f"import samestep\n{text}\n")
        with pytest.raises(samestep.UserError, match="verify"):
            samestep.check("mine.py")
