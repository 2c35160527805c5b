"""`samestep data`: the verb hands its arguments on, lists the catalog and explains itself."""

import hashlib

import pytest

from samestep.commands.data import main
from samestep.data import catalog
from samestep.errors import UserError
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


def test_list_shows_every_data_set_with_its_size_licence_and_source(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for words in ("mnist", "11.6 MB", "CC BY-SA 3.0", "fashion-mnist", "30.9 MB", "MIT", "https"):
        assert words in shown


@pytest.mark.parametrize("width", [60, 80])
def test_no_word_of_the_list_is_broken_and_no_address_split(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    for dataset in catalog.CATALOG.values():
        assert f"  {dataset.source}" in lines
        words = f"{dataset.description} {dataset.licence}".split()
        assert set(words) < set(" ".join(lines).split())


def test_an_unknown_name_is_left_to_the_caller_to_show(tmp_path):
    with pytest.raises(UserError, match="'fashion-mnist'"):
        main(["get", "fashion_mnist", "--data-dir", str(tmp_path)])


def test_an_unknown_verb_is_answered_with_the_verbs():
    with pytest.raises(UserError, match=r"'put'.*get, list"):
        main(["put"])


@pytest.mark.parametrize("arguments", [[], ["get"], ["get", "mnist"], ["list", "mnist"]])
def test_wrong_arguments_end_the_command_with_code_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
