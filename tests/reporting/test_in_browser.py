"""The page in a real headless Chromium: drawn, readable at any width, by keyboard, and alone."""

import json

import pytest

from samestep.show.reporting.page import write_report
from tests.reporting.made_runs import append, evaluation, lines_of, write_run
from tests.reporting.test_page import served, with_pictures

browser = pytest.importorskip("tools.browser", reason="selenium is not installed")

pytestmark = [
    pytest.mark.skipif(
        bool(browser.MISSING), reason=f"{' and '.join(browser.MISSING)} not installed (Debian)"
    ),
    pytest.mark.xdist_group("browser"),
]

HOSTILE = "</script><script>window.hacked = true</script><img src=x onerror='window.hacked = true'>"
CLASSES = ("cat", HOSTILE)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with everything that a page shows, and names that would be markup."""
    path = write_run(tmp_path_factory.mktemp("runs") / "run", ranks=2, recipe=HOSTILE)
    test = evaluation(split="test", epoch=3, loss=0.5, accuracy=0.75, samples=8, seconds=0.1)
    classes = {"per_class": dict.fromkeys(CLASSES, 0.75), "confusion": [[3, 1], [1, 3]]}
    append(path, test | classes)
    script = "<script>parent.hacked = true; top.hacked = true; document.title = 'inside'</script>"
    entries = [
        {"name": "own", "kind": "html", "title": HOSTILE, "file": "own.html"},
        {"name": "regression", "kind": "points", "title": "points", "points": [[1, 2]], "of": 1},
        {"name": "samples", "kind": "rows", "title": "rows", "rows": [{"text": HOSTILE}]},
        {"name": "lost", "kind": "note", "title": "lost", "text": HOSTILE},
    ]
    return with_pictures(path, *entries, own_html=f"<h1>mine</h1>{script}".encode())


@pytest.fixture(scope="module")
def url(run):
    return write_report([run]).resolve().as_uri()


@pytest.mark.parametrize("width", [360, 1400])
def test_every_chart_is_drawn_nothing_is_wider_than_the_window_or_fetched(page, url, width):
    page.open(url, width)
    drawn = page.inked()
    assert len(drawn) == page.run("document.querySelectorAll('[data-chart]').length") >= 5
    assert min(drawn) > 500
    assert page.run("document.documentElement.scrollWidth") == width
    assert page.errors() == []
    names = page.run("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in names if not name.startswith(("data:", "blob:"))] == []


def test_no_name_becomes_markup_and_a_recipes_own_html_cannot_reach_the_page(page, url):
    page.open(url)
    assert HOSTILE in page.run("document.body.innerText")
    page.until("document.querySelector('iframe') !== null")
    assert page.run("window.hacked") is None
    assert "inside" not in page.run("document.title")
    assert page.run("document.querySelector('iframe').sandbox.value") == "allow-scripts"


def test_both_themes_are_drawn_by_the_button_on_the_keyboard_or_as_the_system_has_it(page, url):
    from selenium.webdriver.common.keys import Keys

    page.open(url)
    colours = {}
    button = page.driver.find_element("id", "theme")
    page.run("document.getElementById('theme').focus()")
    for _ in range(3):
        button.send_keys(Keys.ENTER)
        theme = page.run("document.documentElement.dataset.theme")
        colours[theme] = page.run("getComputedStyle(document.body).backgroundColor")
        assert min(page.inked()) > 500
    assert colours.keys() == {"auto", "light", "dark"}
    assert colours["light"] != colours["dark"]
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [dark]})
    page.open(url)
    assert page.run("getComputedStyle(document.body).backgroundColor") == colours["dark"]
    assert min(page.inked()) > 500
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_charts_begin_together_and_are_read_by_keyboard_from_the_last_values(page, url):
    from selenium.webdriver.common.keys import Keys

    page.open(url)
    legends = "[...document.querySelectorAll(\"[data-chart='loss'] .u-value\")]"
    told = page.run(f"{legends}.map((one) => one.innerText)")
    assert told[0] == "18"
    assert len(told) > 2
    assert all(float(value) > 0 for value in told)
    # The cursor on a chart's first value: at a third of it, where the first epoch ends.
    page.driver.find_element("css selector", "[data-chart='accuracy']").send_keys(Keys.HOME)
    chart = "document.querySelector(\"[data-chart='accuracy'] .u-over\")"
    left = f"new DOMMatrix(getComputedStyle({chart}.querySelector('.u-cursor-x')).transform).e"
    assert page.run(f"{left} / {chart}.clientWidth") == pytest.approx(1 / 3, abs=0.02)


def test_two_runs_are_drawn_on_the_same_axes(page, tmp_path):
    runs = [write_run(tmp_path / name) for name in "AB"]
    page.open(write_report(runs, tmp_path / "both.html", 0.6).as_uri())
    assert min(page.inked()) > 500
    labels = "[...document.querySelectorAll(\"[data-chart='loss'] .u-label\")]"
    named = page.run(f"{labels}.map((one) => one.innerText)")
    assert all(any(run in name for name in named) for run in "AB")
    assert page.errors() == []


def test_a_page_that_is_watched_takes_over_what_the_run_writes(page, tmp_path, monkeypatch):
    path = write_run(tmp_path / "run")
    lines = lines_of(path)
    (path / "events.jsonl").write_text("".join(lines[:8]))
    (path / "run.lock").write_text("")
    going = True
    monkeypatch.setattr("samestep.base.run.directory.is_written", lambda path: going)
    steps = "JSON.stringify(document.querySelector(\"[data-chart='loss']\").ariaLabel)"
    with served(path) as port:
        page.open(f"http://127.0.0.1:{port}/")
        before = page.run(steps)
        with (path / "events.jsonl").open("a") as events:
            events.write("".join(lines[8:]))
        page.until(f"{steps} !== {json.dumps(before)}")
        going = False
        page.until("document.getElementById('live').classList.contains('ended')")
        assert min(page.inked()) > 500
        assert page.errors() == []
