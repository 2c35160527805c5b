"""The script from which all planted ones are made."""

from tests.checking.planted import BASE, check


def test_nothing_is_found_in_a_script_without_a_mistake(tmp_path):
    report = check(tmp_path, BASE)
    assert report.findings == []
    assert report.exit_code == 0
    assert report.steps == 4 + 4 + 1  # later epochs end after one batch
