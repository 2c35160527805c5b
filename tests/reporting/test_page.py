"""The page itself: charts have their data, texts are escaped, a browser lets nothing else run."""

import base64
import hashlib
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from samestep.reporting.charts import MOST_CHARTS, MOST_POINTS
from samestep.reporting.collect import collect
from samestep.reporting.page import render, write_report
from samestep.reporting.pictures import LIMIT_BYTES, read_gallery
from tests.reporting.made_runs import PHASES, append, change_start, evaluation, write_run
from tests.reporting.pages import ReadPage

EVIL = "</script><script>alert(1)</script>"


def page_of(*runs):
    rendered = render(collect(list(runs)))
    return rendered, ReadPage(rendered.html)


def test_every_chart_of_the_page_has_its_data_a_label_and_its_numbers(tmp_path):
    _, page = page_of(write_run(tmp_path / "run"))
    hosts = [attributes for _, attributes in page.elements if "data-chart" in attributes]
    assert {host["data-chart"] for host in hosts} == page.charts.keys() != set()
    assert all(host["role"] == "group" and host["aria-label"] for host in hosts)
    details = [attributes.get("id") for tag, attributes in page.elements if tag == "details"]
    assert all(f"values-{ident}" in details for ident in page.charts)
    sources = [*page.with_attribute("src"), *page.with_attribute("href")]
    assert all(source.startswith(("#", "data:")) for source in sources), "nothing is fetched"


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


def test_the_policy_names_the_hash_of_each_script_and_of_the_style(tmp_path):
    rendered, page = page_of(write_run(tmp_path / "run"))
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


def test_a_run_of_many_steps_makes_a_small_page(tmp_path):
    run = write_run(tmp_path / "run", epochs=3000, loss=lambda step: 2 + math.sin(step))
    rendered, page = page_of(run)
    assert len(rendered.html) < 2_000_000
    for chart in page.charts.values():
        assert all(len(curve["x"]) <= MOST_POINTS for curve in chart["curves"])


@pytest.mark.parametrize("name", ["format-1-native", "format-1-lightning"])
def test_runs_of_earlier_versions_have_their_page(tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "kept" / name, run)
    _, page = page_of(run)
    assert all(chart["curves"] for chart in page.charts.values())
    assert "loss" in page.charts


def test_a_run_without_anything_still_makes_a_page(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.toml").write_text("")
    _, page = page_of(run)
    assert page.charts == {}


def test_odd_fields_of_the_first_record_make_a_page_all_the_same(tmp_path):
    run = write_run(tmp_path / "run")
    change_start(run, notes=["file \udce9.png"], num_nodes=[1])
    assert "loss" in ReadPage(write_report([run]).read_text(encoding="utf-8")).charts


def test_numbers_that_no_float_holds_are_gaps(tmp_path):
    run = write_run(tmp_path / "run", phases=dict.fromkeys(PHASES, 1e308))
    append(run, evaluation(accuracy=10**400))
    (run / "result.json").write_text(json.dumps({"test": {"per_class": {"a": 10**400, "b": "x"}}}))
    _, page = page_of(run)
    assert page.charts["accuracy"]["curves"]


def test_more_values_than_a_page_has_charts_are_counted_and_samesteps_own_are_there(tmp_path):
    many = {f"value_{n}": 1.0 for n in range(MOST_CHARTS + 20)}
    run = write_run(tmp_path / "run")
    append(run, evaluation(**many))
    _, page = page_of(run)
    assert len(page.charts) <= MOST_CHARTS + 1
    assert {"loss", "grad_norm", "samples_per_s"} <= page.charts.keys()
    assert f"{len(many) + 1 - (MOST_CHARTS - 5)} more" in page.shown()


def test_html_that_pythons_parser_does_not_know_is_framed_without_its_scripts(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "pictures").mkdir()
    (run / "pictures" / "own.html").write_text("<script>one()</script><![foo bar]>")
    entry = {"name": "own", "kind": "html", "title": "Own", "file": "own.html"}
    told = {"format": 1, "pictures": [entry]}
    (run / "pictures" / "pictures.json").write_text(json.dumps(told))
    _, page = page_of(run)
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


def test_a_damaged_or_missing_picture_is_a_note_and_the_rest_is_there(tmp_path):
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


def test_more_than_a_run_saves_is_not_taken_into_the_page(tmp_path):
    entry = {"name": "big", "kind": "figure", "file": "big.png"}
    run = with_pictures(write_run(tmp_path / "run"), entry, big_png=PNG + bytes(LIMIT_BYTES))
    assert read_gallery(run).pictures[0].kind == "note"
    (run / "pictures" / "pictures.json").write_text("{")
    assert read_gallery(run) is None, "a damaged list"
