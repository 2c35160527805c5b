"""A report of `check` as SARIF 2.1.0, which code scanning shows next to the lines of a change."""

from pathlib import Path
from typing import Any

from samestep.base.plugins import __version__
from samestep.scripts.checking.check_report import CheckReport, shown_file
from samestep.scripts.checking.findings import RULES, Mistake, Origin

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "advice": "note"}


def as_sarif(report: CheckReport) -> dict[str, Any]:
    """Return a report as the object of SARIF; the page of each code travels with it."""
    codes = sorted({finding.code for finding in report.findings})
    driver = {
        "name": "samestep check",
        "semanticVersion": __version__,
        "rules": [_rule(code) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "results": [_result(report, finding, codes) for finding in report.findings],
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(code: str) -> dict[str, Any]:
    rule = RULES[code]
    return {
        "id": code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.page, "markdown": rule.page},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(report: CheckReport, finding: Mistake, codes: list[str]) -> dict[str, Any]:
    text = f"{finding.title}: {finding.evidence.rstrip('.')}. {finding.remedy}".strip()
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
    }
    if finding.related:
        result["relatedLocations"] = [
            _location(report, at) | {"id": number, "message": {"text": at.what}}
            for number, at in enumerate(finding.related)
        ]
    return result | {"locations": [_location(report, finding)]}


def _location(report: CheckReport, at: Mistake | Origin) -> dict[str, Any]:
    # What no line is to blame for is shown at the top of the script.
    name = shown_file(report, at) or report.script
    uri = Path(name).as_uri() if Path(name).is_absolute() else Path(name).as_posix()
    place = {"artifactLocation": {"uri": uri}, "region": {"startLine": max(1, at.line)}}
    return {"physicalLocation": place}
