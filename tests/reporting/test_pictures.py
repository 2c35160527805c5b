"""Pictures that a run saved are in its page, escaped, and nothing from outside of their folder."""

import json

from samestep.reporting.collect import collect
from samestep.reporting.page import render
from samestep.reporting.pictures import LIMIT_BYTES, read_gallery
from tests.reporting.made_runs import write_run
from tests.reporting.pages import ReadPage

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
