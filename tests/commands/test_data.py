"""`samestep data`: the verb hands its arguments on, lists the catalog and explains itself."""

import hashlib

import pytest

from samestep.commands.data import main
from samestep.data import catalog
from tests.command_line import call
from tests.data.loopback import Answer, Mirror


def test_get_downloads_from_the_mirrors_named_in_their_order(tmp_path, monkeypatch, capsys):
    file = catalog.RemoteFile("file", hashlib.md5(b"bytes").hexdigest(), 5)
    tiny = catalog.RemoteDataset(
        name="tiny", description="", licence="", source="", files=(file,), mirrors=()
    )
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": tiny})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    arguments = ["get", "tiny", "--data-dir", str(tmp_path)]
    with Mirror({}, Answer(status=404)) as gone, Mirror({"file": b"bytes"}) as good:
        assert main([*arguments, "--mirror", gone.url, "--mirror", good.url]) == 0
    assert len(gone.asked) == len(good.asked) == 1
    assert (tmp_path / "file").read_bytes() == b"bytes"
    assert str(tmp_path) in capsys.readouterr().out


def test_list_shows_size_licence_and_source_and_breaks_no_word_nor_address(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    for words in ("mnist", "11.6 MB", "fashion-mnist", "30.9 MB"):
        assert words in shown
    for dataset in catalog.CATALOG.values():
        assert f"  {dataset.source}" in lines
        words = f"{dataset.description} {dataset.licence}".split()
        assert set(words) < set(shown.split())


def test_an_unknown_name_or_verb_is_answered_with_those_there_are(tmp_path, refused):
    words = ("data", "get", "fashion_mnist", "--data-dir", str(tmp_path))
    assert "'fashion-mnist'" in refused(*words)
    message = refused("data", "put")
    assert "'put'" in message
    assert "get, list" in message


@pytest.mark.parametrize("arguments", [[], ["get"], ["get", "mnist"], ["list", "mnist"]])
def test_wrong_arguments_end_the_command_with_code_2(arguments):
    assert call("data", *arguments) == 2
