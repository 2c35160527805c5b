"""The page of a run that goes on: for this machine alone, read-only, always new."""

import http.client
import json
import math
import socket
from contextlib import contextmanager
from threading import Thread

from samestep.reporting.page import RunServer
from tests.reporting.made_runs import lines_of, write_run
from tests.reporting.pages import ReadPage


@contextmanager
def served(run):
    with RunServer(run, 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def ask(port, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_served_with_a_policy_and_is_kept_by_nobody(tmp_path):
    with served(write_run(tmp_path / "run")) as port:
        status, headers, html = ask(port)
    assert status == 200
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    page = ReadPage(html)
    assert page.charts.keys() >= {"loss", "phases"}
    assert json.loads(page.scripts["report-live"])["every_ms"] == 2000
    policy = next(p for p in page.with_attribute("content") if p and p.startswith("default-src"))
    assert headers["Content-Security-Policy"] == f"{policy}; frame-ancestors 'none'"
    assert "connect-src 'self'" in policy


HOSTS = {
    **dict.fromkeys(("localhost", "localhost:8008", "127.0.0.1:1", "LOCALHOST"), 200),
    **dict.fromkeys(("[::1]:8008", "[::1]"), 200),
    **dict.fromkeys(("evil.example", "192.168.0.7:8008", "", "localhost:evil"), 403),
    **dict.fromkeys(("localhost.evil.example:8008", "127.0.0.1.evil.example"), 403),
}


def test_only_names_of_this_machine_the_pages_paths_and_reading_are_answered(tmp_path):
    run = write_run(tmp_path / "run", epochs=1)
    before = sorted(run.rglob("*"))
    with served(run) as port:
        for path in ("/", "/data.json"):
            assert {host: ask(port, path, Host=host)[0] for host in HOSTS} == HOSTS
        for path in ("/settings.toml", "/../x", "/?token=1", "/data.json?x"):
            assert ask(port, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert ask(port, "/", method)[0] == 501
    assert sorted(run.rglob("*")) == before


def test_news_have_what_the_run_wrote_meanwhile_and_say_when_it_ends(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    lines = lines_of(run)
    (run / "events.jsonl").write_text("".join(lines[:8]))
    (run / "run.lock").write_text(f"process 1 on {socket.gethostname()}\n")
    going = True
    monkeypatch.setattr("samestep.reporting.page._SHARE", math.inf)  # reads as often as asked
    monkeypatch.setattr("samestep.run.directory.is_written", lambda path: going)
    with served(run) as port:
        first = json.loads(ask(port, "/data.json")[2])
        (run / "events.jsonl").write_text("".join(lines))
        second = json.loads(ask(port, "/data.json")[2])
        going = False
        third = json.loads(ask(port, "/data.json")[2])
        (run / "events.jsonl").unlink()
        (run / "settings.toml").unlink()
        assert ask(port, "/data.json")[0] == 503, "a run that is deleted ends no server"
    assert [len(news["charts"][0]["curves"][0]["x"]) for news in (first, second)] == [6, 18]
    assert [news["ended"] for news in (first, second, third)] == [False, False, True]
    assert "data-live" in first["body"]


def test_a_run_is_not_read_again_while_that_would_take_more_than_its_share(tmp_path, monkeypatch):
    monkeypatch.setattr("samestep.reporting.page._SHARE", 1e-9)
    run = write_run(tmp_path / "run")
    lines = lines_of(run)
    (run / "events.jsonl").write_text("".join(lines[:8]))
    with served(run) as port:
        first = ask(port, "/data.json")[2]
        (run / "events.jsonl").write_text("".join(lines))
        assert ask(port, "/data.json")[2] == first
