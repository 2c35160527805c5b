"""A rule, what it finds, and what it could not see.

A rule is a function of `Seen` that yields `Found` and `NotSeen`. It judges by what the ranks did
in this run, never by the text of the source. The head of its page in the handbook says what is
wrong, how grave it is and why.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.seen import Seen
from samestep.scripts.checking.starts import SeenResumed

Severity = Literal["error", "warning", "advice"]


@dataclass(frozen=True)
class Found:
    """What a rule found: where in the user's code, and the numbers that were seen."""

    where: str  # `file.py:41`; empty if no line of the script is to blame
    evidence: str
    remedy: str = ""
    """What to change; lines that begin with `- ` and `+ ` are a small diff."""
    severity: Severity | None = None  # if other than the rule's own
    comes_from: Mapping[str, str] = field(default_factory=dict)
    """Where the cause may be, if not at `where`: what is made there → `file.py:12`."""


def replaced(line: str, instead: str, otherwise: str = "") -> str:
    """Return a remedy as a small diff, or in words if a line can be left as it is."""
    return f"- {line}\n+ {instead}" if instead != line else otherwise


@dataclass(frozen=True)
class NotSeen:
    """Why a rule could not tell: no evaluation within the steps, only one epoch."""

    why: str


RuleFunction = Callable[[Seen], Iterator[Found | NotSeen]]


@dataclass(frozen=True)
class Rule:
    """A kind of mistake."""

    code: str
    severity: Severity
    title: str
    why: str  # why it matters, in one sentence
    page: str
    apply: RuleFunction
    least_ranks: int
    """On fewer ranks it cannot show, nor in a script that knows nothing of ranks."""
    residual: bool
    """Whether it speaks only where no other rule explains the step: codes SS1xx to SS3xx."""


RESUME = "SS8"  # the family of codes that only `check --resume` judges
RULES: dict[str, Rule] = {}  # by code; the modules of `rules/` fill it as they are imported
_PAGES = Path(__file__).parent / "pages"


def rule(
    code: str, *, least_ranks: int = 2, residual: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule that has a page."""
    page = (_PAGES / f"{code}.md").read_text(encoding="utf-8")
    head = re.match(rf"# {code}: (.+)\n\n\*\*(error|warning|advice)\*\* · ((?:.+\n)+)", page)
    assert head is not None, f"{code}.md begins with title, severity and why"
    severity: Any = head[2]
    why = " ".join(head[3].split())

    def register(function: RuleFunction) -> RuleFunction:
        RULES[code] = Rule(code, severity, head[1], why, page, function, least_ranks, residual)
        return function

    return register


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A line that a mistake may come from, other than the one where it shows."""

    file: str
    line: int
    what: str
    """What is made there: the optimizer, the loader."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake in a script, as it is reported."""

    code: str
    severity: Severity
    file: str
    line: int
    title: str
    evidence: str
    why: str
    remedy: str
    related: tuple[Origin, ...] = ()


def apply_rules(seen: Seen) -> tuple[list[Mistake], list[str]]:
    """Return the mistakes that all rules find, the gravest first, and what could not be seen."""
    findings: dict[tuple[str, str], Mistake] = {}
    not_seen: dict[str, None] = {}
    for code, kind in sorted(RULES.items()):
        if code.startswith(RESUME) != isinstance(seen, SeenResumed):
            continue
        if (1 if seen.is_of_one_process else seen.world_size) < kind.least_ranks:
            continue
        for result in kind.apply(seen):
            if isinstance(result, NotSeen):
                not_seen[f"{code} {kind.title}: {result.why}"] = None
                continue
            file, line = _place(result.where)
            origins = [(_place(at), what) for what, at in result.comes_from.items() if at]
            finding = Mistake(
                code=code,
                severity=result.severity or kind.severity,
                file=file,
                line=line,
                title=kind.title,
                evidence=result.evidence,
                why=kind.why,
                remedy=result.remedy,
                related=tuple(
                    Origin(file=at[0], line=at[1], what=what)
                    for at, what in origins
                    if at != (file, line)
                ),
            )
            # One line may do the same for several loaders, models or files: the first tells it.
            findings.setdefault((code, result.where or result.evidence), finding)
    if saved := next((event.where for event in seen.any(ev.FileSaved) if event.resumable), ""):
        why = f"`samestep check --resume auto` resumes from what {saved} saves, and compares"
        not_seen[f"SS831 {RULES['SS831'].title}: {why}"] = None
    grave = ("error", "warning", "advice")
    explained = any(
        f.code < "SS4" and f.severity != "advice"
        for f in findings.values()
        if not RULES[f.code].residual
    )
    unexplained = [f for f in findings.values() if not (explained and RULES[f.code].residual)]
    return sorted(unexplained, key=lambda f: (grave.index(f.severity), f.code)), list(not_seen)


def _place(where: str) -> tuple[str, int]:
    """Return the file and line of `file.py:41`."""
    file, _, line = where.rpartition(":")
    return file, int(line) if line.isdecimal() else 0


_SILENCED = re.compile(r"#\s*samestep:\s*ignore\[([^\]]*)\]")


def without_silenced(findings: Iterable[Mistake], folder: Path) -> list[Mistake]:
    """Leave out what `# samestep: ignore[SS104]` silences: on the line, or by itself above it."""
    left = []
    for finding in findings:
        try:
            lines = (folder / finding.file).read_text().splitlines()[: finding.line][-2:]
        except (OSError, ValueError):
            lines = []
        above = [line for line in lines[:-1] if line.lstrip().startswith("#")]
        comments = _SILENCED.findall("\n".join([*above, *lines[-1:]]))
        if finding.code not in re.findall(r"\w+", " ".join(comments)):
            left.append(finding)
    return left
