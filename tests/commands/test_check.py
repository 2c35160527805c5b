"""`samestep check`: what it says of a script, where it writes it, what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import samestep.scripts.checking.rules  # noqa: F401 - registers them
from samestep.scripts.checking.check_report import CheckReport, as_table, report_lines
from samestep.scripts.checking.findings import RULES, Mistake, Origin, without_silenced
from samestep.scripts.checking.sarif import as_sarif
from tests.checking.planted import BASE, forked, line_of, planted
from tests.command_line import call

PAGES = Path(__file__).parents[2] / "docs" / "reference" / "check"
EXAMPLES = PAGES.parents[2] / "examples"


@pytest.fixture(autouse=True)
def _forked_ranks(monkeypatch):
    monkeypatch.setattr("samestep.scripts.checking.ranks_of_script.start_processes", forked)


def report_of(folder: Path, *severities: str, source: str = BASE, **more) -> CheckReport:
    """Return a report with a finding of each severity, one a line from line 30 on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(source)
    findings = [
        Mistake(
            code="SS309",
            severity=severity,
            file="train.py",
            line=30 + number,
            title="the step is not that of the joined batch",
            evidence="the gradient of the first step is 2 times that of the joined batch of 8 + 8",
            why="One process that trains on all samples would take another step " * 3,
            remedy="- loss.backward()\n+ (loss / 2).backward()",
        )
        for number, severity in enumerate(severities)
    ]
    lists = {"not_seen": [], "notes": [], "output": [], "findings": findings}
    facts = {"steps": 12, "seconds": 3.2, "ranks": 2, "script": "train.py", "folder": folder}
    return CheckReport(**lists | facts | more)


def test_the_example_has_the_mistakes_that_the_handbook_shows(here, output_of):
    source = (EXAMPLES / "check_me.py").read_text()
    (here / "code").mkdir()
    (here / "code" / "check_me.py").write_text(source)
    words = ("check", "code/check_me.py", "--json", "--sarif", "found.sarif")
    report = json.loads(output_of(*words, code=1))
    assert {"findings", "not_seen", "steps", "seconds"} <= report.keys()
    assert report["seconds"] > 0
    lines = {
        "SS103": "in enumerate(train_loader)",
        "SS301": "loss.backward()",
        "SS401": "print(",
        "SS404": "torch.save(",
        "SS501": "torch.save(",
        "SS503": "torch.save(",
        "SS603": "dist.init_process_group(",
    }
    found = report["findings"]
    expected = {code: line_of(source, part) for code, part in lines.items()}
    assert {one["code"]: one["line"] for one in found} == expected
    keys = {"code", "severity", "file", "line", "title", "evidence", "why", "remedy", "related"}
    assert all(one.keys() == keys and one["file"] == "code/check_me.py" for one in found)
    (run,) = json.loads((here / "found.sarif").read_text())["runs"]
    assert {one["ruleId"] for one in run["results"]} == expected.keys()
    left = {path.name for path in here.rglob("*")}
    assert left == {"code", "check_me.py", "found.sarif"}, "it runs in a copy"
    shown = (PAGES.parents[1] / "how-to" / "check.md").read_text()
    for code, line in expected.items():
        assert re.search(rf"^\w+ +{code}  .*\n +examples/check_me.py:{line}$", shown, re.MULTILINE)


def test_a_module_is_checked_and_a_silencing_comment_respected(here, output_of):
    source = planted(
        ("        sampler.set_epoch(epoch)\n", ""),
        ("in train_loader:", "in train_loader:  # samestep: ignore[SS103]"),
        ("range(3)", "range(int(sys.argv[1]))"),
        ("import os\n", "import os\nimport sys\n"),
    )
    (here / "pkg").mkdir()
    (here / "pkg" / "train.py").write_text(source)
    text = output_of("check", "--nproc", "2", "-m", "pkg.train", "--", "2")
    assert "8 steps" in text
    assert "1 finding silenced" in text


@pytest.mark.slow
def test_the_example_of_a_resume_has_the_mistakes_that_the_handbook_shows(output_of):
    words = ["--resume", "--resume-from out/last.pt", "--nproc", "1", "--json"]
    found = json.loads(output_of("check", *words, str(EXAMPLES / "resume_me.py"), code=1))
    page = (EXAMPLES.parent / "docs" / "how-to" / "resume-check.md").read_text()
    assert [one["code"] for one in found["findings"]] == ["SS803", "SS813"]
    for one in found["findings"]:
        assert f"{one['code']}  {one['title']}" in page
        assert f"examples/resume_me.py:{one['line']}\n" in page
        assert f"seen     {one['evidence']}\n" in page


@pytest.mark.parametrize(
    ("severities", "code"), [((), 0), (("advice",), 0), (("warning", "advice"), 1), (("error",), 1)]
)
def test_advice_alone_is_no_failure(tmp_path, severities, code):
    assert report_of(tmp_path, *severities).exit_code == code


@pytest.mark.parametrize(("width", "colour"), [(60, False), (120, True)])
def test_the_text_fits_the_terminal_and_shows_the_users_line(tmp_path, width, colour):
    long = "counts += " + " + ".join(f"number_{n}" for n in range(40))
    source = BASE.replace("loss.backward()", long)
    line = line_of(source, long)
    report = report_of(
        tmp_path,
        *("error", "warning"),
        source=source,
        not_seen=[f"SS309 {RULES['SS309'].title}: no evaluation", "SS401 a shard: no evaluation"],
        notes=["a note " * 20],
        silenced=1,
    )
    report = replace(report, findings=[replace(one, line=line) for one in report.findings])
    text = "\n".join(report_lines(report, width, colour=colour))
    assert colour == ("\x1b[" in text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    place = f"{tmp_path}/train.py:{line}"
    assert max(len(one) for one in plain.splitlines() if place not in one) <= width
    for word in ("SS309", place, "counts += ", "+ (loss / 2).backward()", "1 error, 1 warning"):
        assert word in plain
    assert plain.count("no evaluation") <= 2


@pytest.mark.parametrize(
    ("line", "above", "kept"),
    [
        ("step()", "", True),
        ("step()  # samestep: ignore[SS104, SS309] as it should be", "", False),
        ("step()  # samestep: ignore[SS104]", "", True),
        ("step()", "    # samestep: ignore[SS309]", False),
        ("step()", "other()  # samestep: ignore[SS309]", True),
    ],
)
def test_a_comment_silences_the_codes_that_it_names_at_its_line(tmp_path, line, above, kept):
    (finding,) = report_of(tmp_path, "error").findings
    for number in (1, 2):
        source = [above, line] if number == 2 else [line]
        (tmp_path / "train.py").write_text("\n".join([*source, "more()"]))
        found = without_silenced([replace(finding, line=number)], tmp_path)
        assert bool(found) == (kept or (number == 1 and "ignore" in above))


def test_sarif_has_what_its_schema_requires(here):
    report = report_of(here / "code", "error", "warning", "advice")
    found = as_sarif(report)
    assert (found["version"], found["$schema"][:8]) == ("2.1.0", "https://")
    (run,) = found["runs"]
    assert run["tool"]["driver"]["name"]
    rules = run["tool"]["driver"]["rules"]
    for rule in rules:
        assert re.fullmatch(r"SS\d{3}", rule["id"])
        for text in ("shortDescription", "fullDescription", "help"):
            assert rule[text]["text"]
    assert [one["level"] for one in run["results"]] == ["error", "warning", "note"]
    for number, result in enumerate(run["results"]):
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        (place,) = result["locations"]
        assert place["physicalLocation"]["artifactLocation"]["uri"] == "code/train.py"
        assert place["physicalLocation"]["region"]["startLine"] == 30 + number
    related = (Origin(file="train.py", line=3, what="the loader is made"),)
    report = replace(report, findings=[replace(report.findings[0], related=related)])
    (place,) = as_sarif(report)["runs"][0]["results"][0]["relatedLocations"]
    assert place["message"] == {"text": "the loader is made"}
    assert place["physicalLocation"]["region"]["startLine"] == 3
    (told,) = as_table(report)["findings"][0]["related"]
    assert told == {"file": "code/train.py", "line": 3, "what": "the loader is made"}
    assert "code/train.py:3  (the loader is made)" in str(report)
    report = replace(report, findings=[replace(report.findings[0], file="", line=0)])
    place = as_sarif(report)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "train.py", "it points at the script"
    assert place["region"]["startLine"] == 1
    assert as_table(report)["findings"][0]["file"] == ""


def test_a_recipe_and_a_loop_of_ones_own_are_given_to_verify(here, capfd, monkeypatch, refused):
    asked = []
    monkeypatch.setattr(
        "samestep.shell.commands.verify.main", lambda words: asked.append(words) or 7
    )
    (here / "mine.py").write_text(
        "from samestep import Recipe\nrecipe = Recipe(model=dict, data=list)\n"
    )
    (here / "own.py").write_text("import samestep\nwith samestep.open_run('x') as run:\n    pass\n")
    assert call("check", "mine.py", "--json", "--nproc", "3") == 7
    assert call("check", "own.py", "--json", "--", "runs/x", "--epochs", "1") == 7
    assert call("check", "spiral") == 7
    assert asked == [
        ["mine.py", "--json", "--nproc", "1,3"],
        ["own.py", "--json", "--", "runs/x", "--epochs", "1"],
        ["spiral"],
    ]
    assert "samestep verify spiral" in capfd.readouterr().err
    assert "--sarif" in refused("check", "mine.py", "--sarif", "found.sarif")
    assert "--resume" in refused("check", "mine.py", "--resume", "auto")
    assert "--" in refused("check", "mine.py", "--", "--epochs", "1")


def test_the_list_has_every_code_and_a_page_for_each(output_of):
    shown = output_of("check", "--list")
    assert re.findall(r"^SS\d{3}", shown, re.MULTILINE) == sorted(RULES)
    assert {path.stem for path in PAGES.glob("*.md")} == {*RULES}
    for page in PAGES.glob("*.md"):
        text = page.read_text()
        assert len(text.splitlines()) <= 25, page
        assert text.count("```") == 2, "an example"
    code = min(RULES)
    assert output_of("check", "--list", code) == (PAGES / f"{code}.md").read_text()
