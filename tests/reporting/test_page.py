"""The page: charts have their data, nothing runs but its own; served to this machine alone."""

import base64
import hashlib
import http.client
import json
import math
import socket
from contextlib import contextmanager
from itertools import pairwise
from threading import Thread

from samestep.base.run.pictures import LIMIT_BYTES, read_gallery
from samestep.show.reporting.charts import MOST_CHARTS, MOST_POINTS
from samestep.show.reporting.collect import collect
from samestep.show.reporting.page import RunServer, render, write_report
from tests.reporting.made_runs import PHASES, append, change_start, evaluation, lines_of, write_run
from tests.reporting.pages import ReadPage

EVIL = "</script><script>alert(1)</script>"


def page_of(*runs):
    rendered = render(collect(list(runs)))
    return rendered, ReadPage(rendered.html)


def test_every_chart_has_its_data_and_label_and_the_policy_names_each_script(tmp_path):
    _, page = page_of(write_run(tmp_path / "run"))
    hosts = [attributes for _, attributes in page.elements if "data-chart" in attributes]
    assert {host["data-chart"] for host in hosts} == page.charts.keys() != set()
    assert all(host["role"] == "group" and host["aria-label"] for host in hosts)
    details = [attributes.get("id") for tag, attributes in page.elements if tag == "details"]
    assert all(f"values-{ident}" in details for ident in page.charts)
    sources = [*page.with_attribute("src"), *page.with_attribute("href")]
    assert all(source.startswith(("#", "data:")) for source in sources), "nothing is fetched"
    rendered, page = page_of(write_run(tmp_path / "policy"))
    code = [text for name, text in page.scripts.items() if name.startswith("code-")]
    style = rendered.html.split("<style>")[1].split("</style>")[0]
    for text in (*code, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in rendered.policy
    assert "unsafe-inline" not in rendered.policy
    assert rendered.policy in page.with_attribute("content")
    assert "style" not in {name for _, attributes in page.elements for name in attributes}
    handlers = {n for _, attributes in page.elements for n in attributes if n.startswith("on")}
    assert handlers == set()


def test_ids_are_unique_headings_descend_by_one_and_links_lead_somewhere(tmp_path):
    runs = [write_run(tmp_path / name, recipe=name) for name in ("a", "b")]
    for rendered in (page_of(*runs), page_of(runs[0])):
        page = rendered[1]
        ids = page.with_attribute("id")
        assert len(ids) == len(set(ids))
        levels = [int(tag[1]) for tag, _ in page.elements if tag in ("h1", "h2", "h3", "h4")]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        links = [a["href"] for tag, a in page.elements if tag == "a"]
        assert {link.removeprefix("#") for link in links} <= set(ids)


def test_markup_in_names_appears_as_text_and_never_as_an_element(tmp_path):
    run = write_run(tmp_path / "run", recipe=EVIL, note=EVIL)
    test = {"per_class": {EVIL: 0.5, "b": 1.0}, "confusion": [[1, 1], [0, 2]], EVIL: 1.0}
    (run / "result.json").write_text(json.dumps({"status": EVIL, "test": test}))
    append(run, evaluation(**{EVIL: 1.0}))
    _, page = page_of(run)
    assert len(page.scripts) == 4
    assert EVIL in page.shown()
    assert EVIL in [chart["title"] for chart in page.charts.values()]
    assert not [ident for ident in page.with_attribute("id") if not ident or "<" in ident]


def test_records_that_are_missing_odd_or_too_large_still_make_a_page(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.toml").write_text("")
    _, page = page_of(run)
    assert page.charts == {}
    run = write_run(tmp_path / "odd")
    change_start(run, notes=["file \udce9.png"], num_nodes=[1])
    assert "loss" in ReadPage(write_report([run]).read_text(encoding="utf-8")).charts
    run = write_run(tmp_path / "large", phases=dict.fromkeys(PHASES, 1e308))
    append(run, evaluation(accuracy=10**400))
    (run / "result.json").write_text(json.dumps({"test": {"per_class": {"a": 10**400, "b": "x"}}}))
    _, page = page_of(run)
    assert page.charts["accuracy"]["curves"]


def test_a_page_stays_small_and_counts_what_it_leaves_out(tmp_path):
    many = {f"value_{n}": 1.0 for n in range(MOST_CHARTS + 20)}
    run = write_run(tmp_path / "run")
    append(run, evaluation(**many))
    _, page = page_of(run)
    assert len(page.charts) <= MOST_CHARTS + 1
    assert {"loss", "grad_norm", "samples_per_s"} <= page.charts.keys()
    assert f"{len(many) + 1 - (MOST_CHARTS - 5)} more" in page.shown()
    run = write_run(tmp_path / "steps", epochs=3000, loss=lambda step: 2 + math.sin(step))
    rendered, page = page_of(run)
    assert len(rendered.html) < 2_000_000
    for chart in page.charts.values():
        assert all(len(curve["x"]) <= MOST_POINTS for curve in chart["curves"])


def test_html_that_pythons_parser_does_not_know_is_framed_without_its_scripts(tmp_path):
    entry = {"name": "own", "kind": "html", "title": "Own", "file": "own.html"}
    html = b"<script>one()</script><![foo bar]>"
    _, page = page_of(with_pictures(write_run(tmp_path / "run"), entry, own_html=html))
    assert page.with_attribute("data-picture") == ["own"]


PNG = b"\x89PNG\r\n\x1a\n"


def with_pictures(run, *entries, **files):
    folder = run / "pictures"
    folder.mkdir()
    told = {"format": 1, "checkpoint": "checkpoint_epoch_3.pt", "split": "test"}
    (folder / "pictures.json").write_text(json.dumps({**told, "pictures": entries}))
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return run


def test_each_kind_of_picture_is_shown(tmp_path):
    image = {"file": "a.png", "target": "cat<b>", "predicted": "dog", "probability": 0.975}
    run = with_pictures(
        write_run(tmp_path / "run"),
        {"name": "boundary", "kind": "figure", "title": "Boundary", "file": "b.svg", "text": "it"},
        {"name": "own", "kind": "html", "title": "Own", "file": "own.html"},
        {"name": "shots", "kind": "images", "title": "Shots", "right": [], "wrong": [image]},
        {"name": "fit", "kind": "points", "title": "Fit", "points": [[0, 1], [2, 3]], "of": 9000},
        {"name": "texts", "kind": "rows", "title": "Texts", "rows": [{"text": "<i>", "target": 1}]},
        {"name": "none", "kind": "note", "title": "None", "text": "pip install it"},
        a_png=PNG,
        b_svg=b"<svg onload='alert(1)'/>",
        own_html=b"<style>b{}</style><script>let x = '&amp;'</script>",
    )
    rendered = render(collect([run]))
    page = ReadPage(rendered.html)
    assert page.with_attribute("data-picture") == [
        *("boundary", "own", "shots", "fit", "texts", "none")
    ]
    sources = [a["src"] for tag, a in page.elements if tag == "img"]
    assert [source.partition(",")[0] for source in sources] == [
        *("data:image/svg+xml;base64", "data:image/png;base64")
    ]
    frame = next(attributes for tag, attributes in page.elements if tag == "iframe")
    assert frame["sandbox"] == "allow-scripts"
    assert frame["srcdoc"].endswith("</script>")
    assert "cat<b>" in page.shown()
    assert not [tag for tag, _ in page.elements if tag in ("b", "i")]
    assert len([tag for tag, _ in page.elements if tag == "circle"]) == 2
    assert "9,000" in page.shown()


def test_damaged_missing_or_large_pictures_are_notes_and_the_rest_is_there(tmp_path):
    run = with_pictures(
        write_run(tmp_path / "run"),
        {"name": "gone", "kind": "figure", "title": "Gone", "file": "gone.png"},
        {"name": "away", "kind": "figure", "title": "Away", "file": "../result.json"},
        {"name": "odd", "kind": "hologram"},
        {"name": "flat", "kind": "points", "points": [["a", None]]},
        "no entry",
        {"name": "here", "kind": "figure", "file": "here.png"},
        here_png=PNG,
    )
    found = read_gallery(run).pictures
    assert [(picture.name, picture.kind) for picture in found] == [
        *(("gone", "note"), ("away", "note"), ("odd", "note"), ("flat", "note")),
        ("here", "figure"),
    ]
    entry = {"name": "big", "kind": "figure", "file": "big.png"}
    run = with_pictures(write_run(tmp_path / "large"), entry, big_png=PNG + bytes(LIMIT_BYTES))
    assert read_gallery(run).pictures[0].kind == "note"
    (run / "pictures" / "pictures.json").write_text("{")
    assert read_gallery(run) is None, "a damaged list"


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
    monkeypatch.setattr("samestep.show.reporting.page._SHARE", math.inf)  # reads as often as asked
    monkeypatch.setattr("samestep.base.run.directory.is_written", lambda path: going)
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
    monkeypatch.setattr("samestep.show.reporting.page._SHARE", 1e-9)
    run = write_run(tmp_path / "run")
    lines = lines_of(run)
    (run / "events.jsonl").write_text("".join(lines[:8]))
    with served(run) as port:
        first = ask(port, "/data.json")[2]
        (run / "events.jsonl").write_text("".join(lines))
        assert ask(port, "/data.json")[2] == first
