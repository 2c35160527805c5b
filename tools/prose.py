"""Find sentences that are not plain English: python tools/prose.py [FILE ...].

The rules are in tools/words.toml. Pages are read without code and addresses. Of Python
files, it reads docstrings, comments, and strings of at least three words.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"`+[^`]*`+")
ADDRESS = re.compile(r"\]\([^)]*\)|https?://\S+|<[^>]+>|\{#[^}]*\}")
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=\S)|\n\n+")
WORD = re.compile(r"[^\W_][\w'’.,/-]*")  # noqa: RUF001 - both apostrophes
MARK = re.compile(r"^\s*(#+|[-*>]|\d+\.)\s+|^\s*(:::|!!!|\?\?\?|\[\^?\w+\]:).*$")


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Prose that belongs together, and the number of its first line; it keeps its line breaks."""

    line: int
    text: str
    is_row: bool = False
    """Whether it is a row of a table, whose cells are no sentences to count."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of words.toml."""

    patterns: list[tuple[re.Pattern[str], str]]
    sentence_words: int
    page_line: int
    paths: dict[str, list[str]]


def read_rules(path: Path = ROOT / "tools" / "words.toml") -> Rules:
    """Read the rules; a phrase under `except` is matched first and so hides the word in it."""
    read = tomllib.loads(path.read_text())
    patterns = []
    for rule in read["rule"]:
        phrases = [re.escape(phrase).replace(r"\ ", r"\s+") for phrase in rule.get("except", [])]
        allowed = "|".join(phrases) or r"(?!)"
        pattern = rule["pattern"].replace(" ", r"\s+")
        expression = rf"(?:{allowed})\b|(?P<hit>{pattern})"
        patterns.append((re.compile(expression, re.IGNORECASE), rule["say"]))
    return Rules(patterns=patterns, paths=read["paths"], **read["lengths"])


def _blank(match: re.Match[str]) -> str:
    return "X" + "\n" * match[0].count("\n")


def passages_of_page(text: str) -> Iterator[Passage]:
    """Yield the paragraphs, list items and headings of a page."""
    first, lines, fence = 1, list[str](), ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        opening = re.match(r"\s*(```+|~~~+)", line)
        if opening and (not fence or opening[1].startswith(fence)):
            fence = "" if fence else opening[1]
        skipped = bool(opening or fence) or line.lstrip().startswith(("|", "<!--", "[!"))
        skipped |= not lines and line.startswith("    ")  # code
        if (skipped or not line.strip() or MARK.match(line)) and lines:
            yield Passage(line=first, text=ADDRESS.sub("", CODE.sub(_blank, "\n".join(lines))))
            lines = []
        if not skipped and line.strip():
            first = first if lines else number
            lines.append(MARK.sub("", line))
        if not fence and line.lstrip().startswith("|"):
            yield Passage(line=number, text=ADDRESS.sub("", CODE.sub("X", line)), is_row=True)


def passages_of_python(text: str) -> Iterator[Passage]:
    """Yield docstrings, comments, and strings that hold at least three words."""
    comments = list[tuple[int, str]]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, said = token.start[0], token.string.lstrip("#! ")
            follows = comments and row == comments[-1][0] + comments[-1][1].count("\n") + 1
            if follows and token.line.lstrip().startswith("#"):
                comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{said}")
            else:
                comments.append((row, said))
    strings = list[tuple[int, str]]()
    inside = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            inside.update(id(part) for part in node.values)
            parts = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
            strings.append((node.lineno, "".join(str(part) for part in parts)))
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            strings.append((node.lineno, node.value if isinstance(node.value, str) else ""))
    long = [(line, said) for line, said in strings if len(said.split()) >= 3]
    for line, said in sorted(comments + long):
        yield Passage(line=line, text=CODE.sub(_blank, said))


def findings(path: Path, rules: Rules) -> Iterator[tuple[int, str]]:
    """Yield the line of each finding in a file and what is wrong there."""
    text = path.read_text()
    page = path.suffix == ".md"
    for passage in passages_of_page(text) if page else passages_of_python(text):
        for pattern, say in rules.patterns:
            for match in pattern.finditer(passage.text):
                if match["hit"]:
                    line = passage.line + passage.text[: match.start()].count("\n")
                    yield line, f'"{" ".join(match[0].split())}": {say}'
        at = 0
        for sentence in SENTENCE.split(passage.text) if page and not passage.is_row else ():
            at = passage.text.index(sentence, at)
            words = len(WORD.findall(sentence))
            if words > rules.sentence_words:
                line = passage.line + passage.text[:at].count("\n")
                begins = " ".join(sentence.split()[:5])
                yield line, f'{words} words in the sentence "{begins} …": split it'
    fenced = False
    for number, written in enumerate(text.splitlines() if page else (), 1):
        fenced ^= written.lstrip().startswith("```")
        long = len(ADDRESS.sub("]", written)) > rules.page_line
        if long and not fenced and not written.lstrip(" ").startswith("|") and written[:4].strip():
            yield number, f"{len(written)} characters in the line: at most {rules.page_line}"


def main(names: list[str]) -> int:
    """Print the findings of these files, by default of the paths in words.toml; 1 if any."""
    rules = read_rules()
    covered = [p for globs in rules.paths.values() for g in globs for p in sorted(ROOT.glob(g))]
    num_findings = 0
    for path in [Path(name) for name in names] or covered:
        shown = path.resolve()
        shown = shown.relative_to(ROOT.resolve()) if shown.is_relative_to(ROOT) else path
        for line, what in sorted(set(findings(path, rules))):
            print(f"{shown}:{line}: {what}")
            num_findings += 1
    return int(num_findings > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
