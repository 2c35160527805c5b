"""`samestep report`: where the page is written, and what is refused."""

from pathlib import Path

import pytest

from samestep.errors import UserError
from tests.command_line import call
from tests.reporting.made_runs import write_run
from tests.reporting.pages import ReadPage


def test_the_page_of_a_run_is_in_its_directory_and_that_of_several_is_here(here, output_of):
    one, other = (str(write_run(here.parent / name)) for name in ("one", "other"))
    assert output_of("report", one) == f"{one}/report.html\n"
    assert "loss" in ReadPage(Path(one, "report.html").read_text()).charts
    assert call("report", one) == 0, "it is written anew"
    assert output_of("report", one, other, "--target", "0.6") == "report.html\n"
    assert (here / "report.html").is_file()


@pytest.mark.parametrize("browser", [True, False])
def test_it_is_written_where_it_is_asked_for_and_opened_if_there_is_a_browser(
    tmp_path, capsys, monkeypatch, browser
):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or browser)
    file = tmp_path / "my page.html"
    assert call("report", str(write_run(tmp_path / "run")), "-o", str(file), "--open") == 0
    assert opened == [file.as_uri()]
    assert capsys.readouterr().out == f"{file}\n"
    assert file.is_file()


def test_a_run_directory_that_cannot_be_written_is_refused_with_the_flag(
    tmp_path, refused, monkeypatch
):
    run = write_run(tmp_path / "run")

    def refuse(path, text):
        denied = PermissionError(13, "Permission denied", str(path))
        raise UserError("as files.py says it") from denied

    with monkeypatch.context() as patch:
        patch.setattr("samestep.reporting.page.write_text", refuse)
        assert "-o report.html" in refused("report", str(run))
    assert call("report", str(run), "-o", str(tmp_path / "page.html")) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "samestep report"),
        (("nowhere",), "nowhere"),
        (("run", "-o", "."), "-o"),
        (("run", "-o", "no/such/page.html"), "no/such"),
        (("run", "run"), "run"),
        (("run", "-o", "run/events.jsonl"), "events.jsonl"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(here, refused, arguments, named):
    write_run(here / "run")
    assert named in refused("report", *arguments)
    assert not list(here.rglob("*.html"))
