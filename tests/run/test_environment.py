"""What a run records of where it ran."""

from samestep.run.environment import git_commit


def test_the_commit_is_read_from_the_repository_around_a_folder(tmp_path):
    git = tmp_path / "project" / ".git"
    inner = tmp_path / "project" / "recipes"
    inner.mkdir(parents=True)
    assert git_commit(inner) == ""
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert git_commit(inner) == "", "there is no commit yet"
    (git / "packed-refs").write_text(f"# pack-refs\n{'b' * 40} refs/heads/main\n")
    assert git_commit(inner) == "b" * 40
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert git_commit(inner) == "a" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert git_commit(inner) == "c" * 40
    (git / "HEAD").write_bytes(b"\xff\xfe")
    assert git_commit(inner) == ""
