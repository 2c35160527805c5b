"""The report of `check`: as data, as text, as JSON; and the handbook page of each code."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError, did_you_mean
from samestep.base.table import Styled, Table, coloured, text_lines
from samestep.base.words import count, duration, wrapped
from samestep.scripts.checking.findings import RULES, Mistake, Origin
from samestep.scripts.checking.seen import source_line

_STYLES = {"error": "red", "warning": "yellow", "advice": "bold"}
_LABEL = 9


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `check` says of a script."""

    findings: list[Mistake]
    not_seen: list[str]
    steps: int
    seconds: float
    notes: list[str]
    output: list[str]
    """What each rank printed, standard output and error together."""
    ranks: int
    script: str
    """The file or module, as it was named."""
    folder: Path
    """Where the user's code is; the files of findings are seen from there."""
    silenced: int = 0
    """Findings that a comment in the source silences."""

    @property
    def exit_code(self) -> int:
        """0 if there is nothing but advice, else 1."""
        return int(any(finding.severity != "advice" for finding in self.findings))

    def __str__(self) -> str:
        return "\n".join(report_lines(self, 100, colour=False))


def as_table(report: CheckReport) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    findings = [
        asdict(finding)
        | {"file": shown_file(report, finding)}
        | {"related": [asdict(at) | {"file": shown_file(report, at)} for at in finding.related]}
        for finding in report.findings
    ]
    return {
        "findings": findings,
        "not_seen": report.not_seen,
        "notes": report.notes,
        "silenced": report.silenced,
        "steps": report.steps,
        "seconds": round(report.seconds, 2),
    }


def shown_file(report: CheckReport, finding: Mistake | Origin) -> str:
    """Return the file of a finding as a user would type it here; empty if it has none."""
    if not finding.file:
        return ""
    path = (report.folder / finding.file).resolve()
    here = Path.cwd().resolve()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)


def report_lines(report: CheckReport, width: int, *, colour: bool) -> Iterator[str]:
    """Yield a report as lines of a terminal."""

    def paint(text: str, style: str) -> str:
        return coloured(Styled(text, style)) if colour else text

    def labelled(label: str, text: str) -> Iterator[str]:
        lines = wrapped(text, "", width - _LABEL) if text else ()
        for number, line in enumerate(lines):
            yield f"{'' if number else label:<{_LABEL}}{line}"

    ranks = f"{count(report.ranks, 'rank')}, {count(report.steps, 'step')}"
    yield f"{paint(report.script, 'bold')}  {ranks}, {duration(report.seconds)}"
    for note in report.notes:
        yield from labelled("note", note)
    for finding in report.findings:
        yield ""
        severity = paint(f"{finding.severity:<{_LABEL}}", _STYLES[finding.severity])
        first, *more = wrapped(
            f"{finding.code}  {finding.title}", " " * (_LABEL + 7), width - _LABEL
        )
        yield severity + paint(first, "bold")
        yield from more
        if finding.file:
            yield from _lines_of(report, finding, "", width)
        yield from labelled("seen", finding.evidence)
        for at in finding.related:
            yield from _lines_of(report, at, f"  ({at.what})", width)
        yield from labelled("why", finding.why)
        yield from _remedy(finding.remedy, labelled, paint)
    yield from _not_seen(report, width)
    yield ""
    style = "red" if report.exit_code else "green"
    yield from (paint(line, style) for line in wrapped(_sentence(report), "", width))


def _lines_of(report: CheckReport, at: Mistake | Origin, what: str, width: int) -> Iterator[str]:
    yield f"{'from' if what else '':<{_LABEL}}{shown_file(report, at)}:{at.line}{what}"
    if code := source_line(report.folder, at.file, at.line):
        most = width - _LABEL - 2
        yield f"{'':<{_LABEL}}  {code if len(code) <= most else code[: most - 1] + '…'}"


def _remedy(remedy: str, labelled: Any, paint: Any) -> Iterator[str]:
    """Yield what to change; the lines of a diff stay whole, to be copied."""
    label = "change"
    styles = {"- ": "red", "+ ": "green", "  ": ""}
    for line in remedy.splitlines():
        if line[:2] in styles:
            yield f"{label:<{_LABEL}}" + paint(line, styles[line[:2]])
        else:
            yield from labelled(label, line)
        label = ""


def _not_seen(report: CheckReport, width: int) -> Iterator[str]:
    """Yield why some codes could not be judged; those of one reason together."""
    codes: dict[str, list[str]] = {}
    for text in report.not_seen:
        code = text.partition(" ")[0]
        why = text.removeprefix(f"{code} {RULES[code].title}: ") if code in RULES else text
        codes.setdefault(why, []).append(code)
    if codes:
        yield ""
        yield "not seen, so neither right nor wrong:"
    for why, those in codes.items():
        yield from wrapped(f"  {', '.join(those)}: {why}", "    ", width)


def _sentence(report: CheckReport) -> str:
    kinds = [finding.severity for finding in report.findings]
    counts = [
        count(kinds.count(kind), "piece") + " of advice"
        if kind == "advice"
        else count(kinds.count(kind), kind)
        for kind in dict.fromkeys(kinds)
    ]
    seen = f"{count(report.steps, 'step')} on {count(report.ranks, 'rank')}"
    text = f"{', '.join(counts)} in {seen}." if counts else f"Nothing wrong was seen in {seen}."
    if counts:
        text += f" `samestep check --list {report.findings[0].code}` says more about a code."
    if report.silenced:
        text += f" {count(report.silenced, 'finding')} silenced by comments in the source."
    return text


def code_lines(width: int | None, *, colour: bool) -> Iterator[str]:
    """Yield a line for each code: how grave it is, and what it is."""
    rows = [
        (code, Styled(rule.severity, _STYLES[rule.severity]), rule.title)
        for code, rule in sorted(RULES.items())
    ]
    columns = ("code", "severity", "what is wrong")
    table = Table(columns=columns, rows=rows, left=frozenset(columns), fold=True)
    yield from text_lines(table, width, colour=colour)


def page_of(code: str) -> str:
    """Return the page of the handbook about a code."""
    if code not in RULES:
        raise UserError(
            f"There is no code {code}. {did_you_mean(code, RULES)}".rstrip(),
            remedy="samestep check --list shows all.",
        )
    return RULES[code].page
