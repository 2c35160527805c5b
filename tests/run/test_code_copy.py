"""What is copied of a user's code, what is only linked, and what is too much."""

import subprocess
from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.base.run import code_copy
from samestep.base.run.code_copy import CODE, DIFF, copy_code, edited_since, find_code, hashed_file

WHO = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    command = ("git", "-C", str(folder), *WHO, *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def repository(tmp_path) -> Path:
    """Give a repository with a commit, an edit since, new files, data, secrets and caches."""
    root = tmp_path / "project"
    files = {"train.py": "old", "src/mine.py": "", "gone.py": "", ".gitignore": "data/\n*.pyc\n"}
    write(root, **files)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    write(root, **{"train.py": "new", "src/new.py": "", "data/a.bin": "", "src/mine.pyc": ""})
    write(root, **{".env": "KEY=1", "src/.env": "KEY=1", "__pycache__/x.py": ""})
    (root / ".gitignore").write_text("data/\n*.pyc\n__pycache__/\n")
    (root / "gone.py").unlink()
    return root


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_tracked_and_new_files_are_copied_and_ignored_data_and_secrets_linked(repository, run):
    (repository / "train.py").chmod(0o700)
    code = find_code(repository / "src" / "mine.py")
    copy_code(code, run)
    copied = {"train.py", "src/mine.py", "src/new.py", ".gitignore"}
    assert {*code.files} == copied
    assert {*code.linked} == {"data/", ".env", "src/.env"}
    there = [path for path in (run / CODE).rglob("*") if path.is_symlink() or path.is_file()]
    found = {path.relative_to(run / CODE).as_posix() for path in there}
    assert found == copied | {"data", ".env", "src/.env"}
    assert (run / CODE / "data").readlink() == repository / "data"
    facts = code_copy.kept_code(run)
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert (facts["file"], facts["commit"], facts["changed"]) == ("src/mine.py", commit, True)
    assert "-old\n" in (run / DIFF).read_text()
    assert (run / CODE / "train.py").stat().st_mode & 0o777 == 0o700
    (repository / "train.py").write_text("newer")
    assert (run / CODE / "train.py").read_text() == "new"


def test_a_folder_without_git_is_copied_but_for_runs_environments_and_caches(tmp_path, run):
    write(tmp_path / "f", **{"a.py": "", "lib/b.py": "", "__pycache__/a.pyc": "", "x.pem": ""})
    write(tmp_path / "f", **{"runs/1/code/a.py": "", "env/pyvenv.cfg": "", "env/c.py": ""})
    write(tmp_path / "f", **{"out/job.sbatch": "", "out/job.json": "", ".data/big": ""})
    write(tmp_path / "f", **{".venv/d.py": "", "o/job.json": "", "o/code.json": "", "o/code/e": ""})
    write(tmp_path / "f", **{"tokens.py": "", "token.txt": "", "tokenizer.json": ""})
    secrets = {".envrc", "prod.env", ".git-credentials", ".pgpass", "_netrc", "hf_token"}
    secrets |= {"api_key.txt", "client_secret_1.json", "service-account.json", "kaggle.json"}
    secrets |= {"id_rsa.bak", "x.PEM~", "x.pem", "token.txt"}
    write(tmp_path / "f", **dict.fromkeys(secrets, ""))
    code = find_code(tmp_path / "f" / "a.py")
    assert {*code.files} == {"a.py", "lib/b.py", "tokens.py", "tokenizer.json"}
    assert {*code.linked} == {"runs/", "env/", "out/", "o/", ".data/"} | secrets
    assert code.commit == ""
    copy_code(code, run)
    assert not (run / DIFF).exists()


def test_a_folder_whose_gitignore_leaves_out_all_is_linked_without_git_too(tmp_path):
    """As that of a sandbox, which holds the key of its munge."""
    write(tmp_path / "f", **{"a.py": "", "sandbox/.gitignore": "*\n", "sandbox/munge/key": ""})
    write(tmp_path / "f", **{"lib/.gitignore": "*.o\n", "lib/b.py": ""})
    code = find_code(tmp_path / "f" / "a.py")
    assert {*code.files} == {"a.py", "lib/.gitignore", "lib/b.py"}
    assert code.linked == {"sandbox/": "ignored by its .gitignore"}


def test_a_submodule_and_a_repository_inside_are_copied_with_their_files(repository, tmp_path):
    write(tmp_path / "other", **{"lib.py": "", ".gitignore": "x\n"})
    git(tmp_path / "other", "init", "-q")
    git(tmp_path / "other", "add", ".")
    git(tmp_path / "other", "commit", "-qm", "first")
    add = ("-c", "protocol.file.allow=always", "submodule", "add", "-q")
    git(repository, *add, str(tmp_path / "other"), "sub")
    git(repository, "clone", "-q", str(tmp_path / "other"), "clone")
    write(repository, **{"sub/x": ""})
    code = find_code(repository / "train.py")
    assert {"sub/lib.py", "clone/lib.py"} <= {*code.files}
    assert "sub/x" in code.linked
    git(repository, "submodule", "deinit", "-f", "sub")  # its folder is empty
    assert "clone/lib.py" in find_code(repository / "train.py").files


def test_untracked_runs_are_linked_and_a_file_that_git_ignores_copied_with_its_folder(repository):
    write(repository, **{"out/1/settings.toml": "", "out/1/environment.json": "", "out/1/a/b": ""})
    write(repository, **{"settings.toml": ""})  # it makes no run of the project
    code = find_code(repository / "train.py")
    assert code.linked["out/1/"] == "a run"
    assert "settings.toml" in code.files
    assert not [name for name in code.files if name.startswith("out/")]
    write(repository, **{"data/try.py": "", "data/helper.py": ""})
    code = find_code(repository / "data" / "try.py")
    assert (code.root, {*code.files}) == (repository / "data", {"try.py", "helper.py", "a.bin"})


def test_links_lead_into_the_copy_or_out_of_it_but_never_to_the_original(tmp_path, run):
    folder = tmp_path / "f"
    write(folder, **{"a.py": "a", "lib/b.py": "b"})
    write(tmp_path, outside="o")
    (folder / "inside").symlink_to("lib/b.py")
    (folder / "lib" / "up").symlink_to("../lib")
    (folder / "out").symlink_to("../outside")
    (folder / "dead").symlink_to("nothing")
    (folder / "whole").symlink_to(folder / "lib" / "b.py")
    copy_code(find_code(folder / "a.py"), run)
    copy = run / CODE
    assert (copy / "whole").resolve() == copy / "lib" / "b.py"
    assert (copy / "inside").resolve() == copy / "lib" / "b.py"
    assert (copy / "lib" / "up").resolve() == copy / "lib"
    assert (copy / "out").read_text() == "o"
    assert (copy / "dead").is_symlink()
    (tmp_path / "link.py").symlink_to(folder / "a.py")
    code = find_code(tmp_path / "link.py")
    assert (code.root, code.file) == (folder, "a.py")


def test_a_file_over_its_limit_is_linked_and_too_much_refused(tmp_path, run, monkeypatch):
    monkeypatch.setattr(code_copy, "MOST_OF_A_FILE", 100)
    monkeypatch.setattr(code_copy, "MOST", 250)
    write(tmp_path / "f", **{"a.py": "", "one": "x" * 99, "two": "x" * 98, "big": "x" * 101})
    code = find_code(tmp_path / "f" / "a.py")
    assert ({*code.files}, {*code.linked}) == ({"a.py", "one", "two"}, {"big"})
    assert code.size == 197
    copy_code(code, run)
    assert (run / CODE / "big").readlink() == tmp_path / "f" / "big"
    write(tmp_path / "f", three="x" * 97)
    with pytest.raises(UserError, match=r"one .*two .*three .*--no-snapshot") as error:
        find_code(tmp_path / "f" / "a.py")
    assert "big" not in str(error.value)


def test_a_failed_copy_leaves_nothing_and_too_many_files_are_refused(tmp_path, run, monkeypatch):
    write(tmp_path / "f", **{"a.py": ""})
    code = find_code(tmp_path / "f" / "a.py")
    (tmp_path / "f" / "a.py").unlink()
    with pytest.raises(UserError, match=r"a\.py"):
        copy_code(code, run)
    assert [*run.iterdir()] == []
    monkeypatch.setattr(code_copy, "MOST_FILES", 3)
    write(tmp_path / "g", **{"a.py": "", **{f"images/{n}": "" for n in range(3)}})
    with pytest.raises(UserError, match=r"images/ \(3\).*--no-snapshot"):
        find_code(tmp_path / "g" / "a.py")


def test_git_is_asked_and_without_it_a_folder_is_what_it_holds(repository, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(repository.parent / "elsewhere"))
    assert find_code(repository / "train.py").commit
    monkeypatch.setenv("PATH", "")
    code = find_code(repository / "train.py")
    assert {"train.py", "src/new.py", "data/a.bin"} <= {*code.files}


def test_an_edit_of_the_file_or_of_one_beside_it_is_seen_without_a_copy(tmp_path, run):
    names = ["b.py", "a.py", "odd name.py"]
    write(tmp_path / "f", **dict.fromkeys(names, "x"), data="x")
    assert (edited_since(run), hashed_file(run)) == ([], None)
    code_copy.keep_hashes(tmp_path / "f" / "b.py", run)
    assert (edited_since(run), hashed_file(run)) == ([], tmp_path / "f" / "b.py")
    command = ("sha256sum", "--quiet", "--check", str(run / code_copy.HASHES))
    assert subprocess.run(command, check=True, capture_output=True).stdout == b""
    write(tmp_path / "f", data="y")
    assert edited_since(run) == []
    write(tmp_path / "f", **{"odd name.py": "y"})
    (tmp_path / "f" / "b.py").unlink()
    assert edited_since(run) == [str(tmp_path / "f" / name) for name in ("b.py", "odd name.py")]
