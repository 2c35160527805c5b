"""A copy of the user's code in a run's directory: a job runs it, whatever is edited meanwhile.

Data is not copied: large files and what git ignores become links to where they are.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from samestep.base.errors import UserError, listed
from samestep.base.run.files import cannot_write, read_object, sha256_of, write_object, write_text
from samestep.base.words import count, size

CODE = "code"
"""The copy, in a run's directory."""
FACTS = "code.json"
"""Where the copy comes from, the commit, and what is only linked."""
DIFF = "code.diff"
"""What was not committed of it, if anything."""
HASHES = "code.sha256"
"""Without a copy: SHA-256 of the file and of the Python files next to it."""

MB = 10**6
MOST_OF_A_FILE, MOST, MOST_FILES = 10 * MB, 200 * MB, 20_000

_GIT_WITHIN_S = 60
_RUN_MARKS = (
    ("settings.toml", "environment.json"),
    ("job.json", "job.sbatch"),
    ("job.json", FACTS),
)
_CACHES = re.compile(r"(^|/)(__pycache__|\.(\w+_cache|git|venv|ipynb_checkpoints))/|\.pyc$")
_SECRETS = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".pypirc", ".pgpass", ".htpasswd"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks"),
    *("*credential", "*credentials", "*credential.*", "*credentials.*", ".git-credentials"),
    *("secret", "secrets", ".secret", ".secrets", "secret.*", "secrets.*", "client_secret*"),
    *("token", "tokens", ".token", ".tokens", "token.*", "tokens.*", "hf_token*", "*_token"),
    *("api_key*", "apikey*", "*_api_key", "service-account*", "service_account*", "kaggle.json"),
)
"""Names of files that may hold a secret, as `.gitignore` would name them; code does not."""
_OF_BEFORE = re.compile(r"(\.(bak|backup|old|orig|save|swp)|~)+$")
"""Endings of backup copies."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """What belongs to a user's file: the folder with it, as git knows it or as it lies there."""

    root: Path
    file: str
    """The file that runs; it and all others are named below the root."""
    files: tuple[str, ...]
    """Copied. Symbolic links are among them."""
    linked: Mapping[str, str]
    """Not copied, but linked to where it is → why."""
    size: int
    """Bytes to copy."""
    commit: str = ""
    diff: str = ""
    """What was not committed."""

    @property
    def text(self) -> str:
        """Say in a line what is copied and what is not."""
        files = f"{count(len(self.files), 'file')}, {size(self.size)}"
        if self.commit:
            files += f", commit {self.commit[:10]}{' and changes' if self.diff else ''}"
        left = [f"{name} ({why})" for name, why in self.linked.items()]
        return files + (f"; linked, not copied: {listed(left, 5)}" if left else "")


def find_code(file: Path) -> Code:
    """Return what to copy with a file: its git repository, or its folder where there is none."""
    file = file.resolve()
    root = file.parent
    names = list[str]()
    tracked = {file.name}
    left_out = dict[str, str]()
    top = _git(file.parent, "rev-parse", "--show-toplevel").rstrip("\n")
    if top and file.is_relative_to(top):
        root = Path(top)
        names, tracked, left_out = _known_to_git(root)
    relative = file.relative_to(root).as_posix()
    in_git = relative in names
    if not in_git:  # no repository, or one that ignores the file
        root, relative = file.parent, file.name
        tracked = {relative}
        names, left_out = _in_folder(root)
    chosen, sizes = [], Counter[str]()
    for name in names:
        path = root / name
        if path.is_symlink():
            chosen.append(name)
        elif path.is_file():
            num_bytes = path.stat().st_size
            why = _why_left_out(path, num_bytes, tracked=name in tracked)
            if why and name != relative:
                left_out[name] = why
            else:
                chosen.append(name)
                sizes[name] = num_bytes
    _check_size(root, chosen, sizes)
    return Code(
        root=root,
        file=relative,
        files=tuple(chosen),
        linked=_outermost(left_out, _folders_of(chosen)),
        size=sizes.total(),
        commit=_git(root, "rev-parse", "HEAD").strip() if in_git else "",
        diff=_git(root, "diff", "--no-ext-diff", "--no-color", "HEAD") if in_git else "",
    )


def _git(folder: Path, *words: str) -> str:
    """Return git's output for a folder; empty without git or a repository."""
    shell = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        done = subprocess.run(
            ("git", "-C", str(folder), *words),
            capture_output=True,
            env=shell,
            timeout=_GIT_WITHIN_S,
            check=False,
        )
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"git needed more than {_GIT_WITHIN_S} s to list the files of {folder}. Submit without "
            "a copy of the code: --no-snapshot."
        ) from error
    return os.fsdecode(done.stdout) if done.returncode == 0 else ""


def _known_to_git(root: Path) -> tuple[list[str], set[str], dict[str, str]]:
    """Return the files of a repository, which of them are tracked, and what is ignored.

    Submodules, and repositories that lie in it, are listed with theirs.
    """
    tracked = _git(root, "ls-files", "-z").split("\0")[:-1]
    others = _git(root, "ls-files", "-z", "-o", "--exclude-standard").split("\0")[:-1]
    ignored = _git(root, "ls-files", "-z", "-o", "-i", "--exclude-standard", "--directory")
    linked = {n: "ignored by git" for n in ignored.split("\0")[:-1] if not _CACHES.search(n)}
    names = list[str]()
    files = set(tracked)
    runs = dict[str, str]()
    for name in dict.fromkeys([*tracked, *others]):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            if not (path / ".git").exists():  # a submodule that is not checked out
                continue
            inner, inner_kept, inner_linked = _known_to_git(path)
            start = f"{name.rstrip('/')}/"
            names += [start + inside for inside in inner]
            files |= {start + inside for inside in inner_kept}
            linked |= {start + inside: why for inside, why in inner_linked.items()}
        elif name not in files and (run := _run_above(root, name, runs)):
            linked[run] = "a run"
        else:
            names.append(name)
    return names, files, linked


def _run_above(root: Path, name: str, cache: dict[str, str]) -> str:
    """Return the directory of a run that an untracked file belongs to; "" if to none."""
    above = name.rpartition("/")[0]
    if not above:
        return ""
    if above not in cache:
        here = f"{above}/" if _is_run(root / above) else ""
        cache[above] = _run_above(root, above, cache) or here
    return cache[above]


def _is_run(folder: Path) -> bool:
    return any(all((folder / name).is_file() for name in marks) for marks in _RUN_MARKS)


def _why_not_code(folder: Path) -> str:
    if (folder / "pyvenv.cfg").is_file():
        return "a virtual environment"
    try:
        ignored = (folder / ".gitignore").read_text(errors="replace").strip()
    except OSError:
        return ""
    return "ignored by its .gitignore" if ignored == "*" else ""


def _in_folder(root: Path) -> tuple[list[str], dict[str, str]]:
    """Return the files of a folder that git does not know, and the folders that are not code."""
    names, linked = list[str](), dict[str, str]()
    for here, folders, files in os.walk(root):
        start = Path(here).relative_to(root).as_posix() + "/"
        start = "" if start == "./" else start
        for folder in sorted(folders):
            path = Path(here, folder)
            if path.is_symlink():
                names.append(start + folder)
            elif _is_run(path) or folder == "runs":
                linked[f"{start}{folder}/"] = "runs"
            elif why := _why_not_code(path):
                linked[f"{start}{folder}/"] = why
            elif folder.startswith("."):
                if not _CACHES.search(f"{folder}/"):
                    linked[f"{start}{folder}/"] = "hidden"
            elif folder != "__pycache__":
                continue
            folders.remove(folder)
        names += [start + name for name in sorted(files) if not _CACHES.search(name)]
        if len(names) > MOST_FILES:
            break  # it may be somebody's home
    return names, linked


def _why_left_out(path: Path, num_bytes: int, *, tracked: bool) -> str:
    if num_bytes > MOST_OF_A_FILE:
        return size(num_bytes)
    plain = _OF_BEFORE.sub("", path.name.lower())
    is_code = plain.endswith((".py", ".ipynb", ".sh"))
    if not (tracked or is_code) and any(fnmatch.fnmatchcase(plain, name) for name in _SECRETS):
        return "may be a secret"
    return "" if os.access(path, os.R_OK) else "cannot be read"


def _folders_of(names: Iterable[str]) -> set[str]:
    """Return the folders that files are in, and those above them; "." is the root."""
    inner = {PurePosixPath(name).parent for name in names}
    return {str(folder) for path in inner for folder in (path, *path.parents)}


def _outermost(linked: Mapping[str, str], copied: set[str]) -> dict[str, str]:
    """Return what to link: nothing in a folder that is a link itself, no folder of copied files."""
    outermost = dict[str, str]()
    for name in sorted(linked):
        path = PurePosixPath(name)
        if str(path) not in copied and not any(f"{up}/" in outermost for up in path.parents):
            outermost[name] = linked[name]
    return outermost


def _check_size(root: Path, names: list[str], sizes: Counter[str]) -> None:
    remedy = (
        "List data in .gitignore (in a git repository it is then linked, not copied), or submit "
        "without a copy: --no-snapshot."
    )
    if len(names) > MOST_FILES:
        folders = Counter(name.rpartition("/")[0] or "." for name in names)
        most = [f"{name}/ ({number:,})" for name, number in folders.most_common(3)]
        raise UserError(
            f"The code in {root} is too much to copy: more than {MOST_FILES:,} files, most of them "
            f"in {listed(most, 3)}. {remedy}"
        )
    if (total := sizes.total()) > MOST:
        most = [f"{name} ({size(num_bytes)})" for name, num_bytes in sizes.most_common(3)]
        raise UserError(
            f"The code in {root} is too much to copy: {size(total)}, and the limit is "
            f"{size(MOST)}. The largest files: {listed(most, 3)}. {remedy}"
        )


def import_folders(code: Code, run: Path, *more: Path) -> tuple[str, ...]:
    """Return the folders of the copy to import from, for those of the original.

    They are those that this process imports from, such as of packages in development, and `more`.
    """
    copied = _folders_of(code.files)
    folders = []
    for folder in [*map(Path, sys.path[1:]), *more]:
        path = folder.resolve()
        if path.is_relative_to(code.root) and str(path.relative_to(code.root)) in copied:
            folders.append(str(run / CODE / path.relative_to(code.root)))
    return tuple(dict.fromkeys(folders))


def copy_code(code: Code, run: Path, folders: tuple[str, ...] = ()) -> None:
    """Copy code into a run's directory, in place of a copy that is there, and note what it is.

    `folders` are noted as those to import from.
    """
    target, temporary = run / CODE, run / f".{CODE}.tmp"
    place = temporary
    remove_code(run)
    try:
        temporary.mkdir()
        for name in code.files:
            place, original = temporary / name, code.root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if original.is_symlink() and name != code.file:
                # Into the copy, or out of the root to where it led.
                leads = Path(os.path.normpath(original.parent / original.readlink()))
                inside = leads.is_relative_to(code.root)
                place.symlink_to(os.path.relpath(leads, original.parent) if inside else leads)
            else:
                shutil.copy2(original, place)
        for name in code.linked:
            place = temporary / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(code.root / name)
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise cannot_write(target / place.relative_to(temporary), error) from error
    table = {
        "root": str(code.root),
        "file": code.file,
        "commit": code.commit,
        "changed": bool(code.diff),
        "files": len(code.files),
        "bytes": code.size,
        "linked": dict(code.linked),
        "import_from": folders,
    }
    if code.diff:
        write_text(run / DIFF, code.diff.encode(errors="replace").decode())
    write_object(run / FACTS, table)


def remove_code(run: Path) -> None:
    """Remove what is kept of the code in a run's directory."""
    shutil.rmtree(run / CODE, ignore_errors=True)
    for name in (FACTS, DIFF, HASHES):
        (run / name).unlink(missing_ok=True)


def kept_code(run: Path) -> dict[str, Any]:
    """Return the facts of a job's copy of the code; nothing where there is none."""
    facts = read_object(run / FACTS) if (run / CODE).is_dir() else {}
    return facts if "root" in facts else {}  # else only what the recipe imports was copied


def keep_hashes(file: Path, run: Path) -> None:
    """Write the hashes of a file and the Python files next to it, in sha256sum's form."""
    beside = (path for path in sorted(file.parent.glob("*.py")) if path != file)
    hashes = ((_sha256(path), path) for path in (file, *beside) if not {*"\n\\"} & {*str(path)})
    write_text(run / HASHES, "".join(f"{sha}  {path}\n" for sha, path in hashes if sha))


def edited_since(run: Path) -> list[str]:
    """Return the files that are no longer as `keep_hashes` noted them, or gone."""
    return [path for sha, path in _hashes(run) if _sha256(Path(path)) != sha]


def hashed_file(run: Path) -> Path | None:
    """Return the file that a run without a copy of its code runs; None if it has none."""
    return next((Path(path) for _, path in _hashes(run)), None)


def _hashes(run: Path) -> list[tuple[str, str]]:
    try:
        lines = (run / HASHES).read_text().splitlines()
    except OSError:
        return []
    return [(sha, path) for sha, _, path in (line.partition("  ") for line in lines)]


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError:
        return ""
