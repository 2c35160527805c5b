"""`samestep report`: where the page is written, and what is refused."""

import pytest

from samestep.errors import UserError
from samestep.run.files import write_text
from tests.command_line import call, one_message
from tests.reporting.made_runs import write_run
from tests.reporting.pages import ReadPage


def test_the_page_of_a_run_is_in_its_directory_and_its_path_is_printed(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert call("report", str(run)) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    assert "loss" in ReadPage((run / "report.html").read_text()).charts
    assert call("report", str(run)) == 0, "it is written anew"


def test_the_page_of_several_runs_is_here(tmp_path, capsys, monkeypatch):
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert call("report", *runs, "--target", "0.6") == 0
    assert capsys.readouterr().out == "report.html\n"
    assert (tmp_path / "report.html").is_file()


def test_it_is_written_where_it_is_asked_for_and_opened(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    file = tmp_path / "my page.html"
    assert call("report", str(write_run(tmp_path / "run")), "-o", str(file), "--open") == 0
    assert opened == [file.as_uri()]
    assert file.is_file()


def test_without_a_browser_the_page_is_there_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    run = write_run(tmp_path / "run")
    assert call("report", str(run), "--open") == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"


def test_a_run_directory_that_cannot_be_written_is_refused_with_the_flag(
    tmp_path, capfd, monkeypatch
):
    run = write_run(tmp_path / "run")

    def refuse(path, text):
        try:
            raise PermissionError(13, "Permission denied", str(path))
        except OSError as error:
            raise UserError("as files.py says it") from error

    monkeypatch.setattr("samestep.reporting.page.write_text", refuse)
    code = call("report", str(run))
    assert "-o report.html" in one_message(code, capfd.readouterr().err)
    monkeypatch.setattr("samestep.reporting.page.write_text", write_text)
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
def test_a_mistake_gets_one_message_and_exit_code_2(tmp_path, capfd, monkeypatch, arguments, named):
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    code = call("report", *arguments)
    assert named in one_message(code, capfd.readouterr().err)
    assert not list(tmp_path.rglob("*.html"))
