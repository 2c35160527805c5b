"""An archive arrives, is verified, then unpacked: the right files or none, and none outside."""

import io
import tarfile
from dataclasses import replace

import pytest

from samestep.base.errors import UserError
from samestep.core.data import catalog
from samestep.core.data.download import unpack
from samestep.core.recipe import find_recipe
from samestep.core.recipes.cifar10 import Cifar10Options, read_cifar10
from samestep.shell.cli import main
from tests.cifar_files import write_binary
from tests.data.loopback import Answer, Mirror, data_set, listed, names_in

NAME = "cifar-10-binary.tar.gz"


def archive_of(folder, top="cifar-10-batches-bin"):
    box = io.BytesIO()
    with tarfile.open(fileobj=box, mode="w:gz") as tar:
        tar.add(folder, arcname=top)
    return box.getvalue()


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return archive_of(write_binary(tmp_path_factory.mktemp("made"), per_file=2, num_test=3))


@pytest.fixture(autouse=True)
def small_catalog(monkeypatch, archive):
    file = replace(listed(NAME, archive), unpack=True)
    monkeypatch.setattr(catalog, "CATALOG", {"cifar10": data_set("cifar10", file)})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_the_verb_fetches_verifies_and_unpacks_and_the_recipe_reads_it(tmp_path, archive, capsys):
    with Mirror({}, Answer(status=404)) as gone, Mirror({NAME: archive}) as mirror:
        mirrors = ("--mirror", gone.url, "--mirror", mirror.url)
        arguments = ["get", "cifar10", "--data-dir", str(tmp_path), *mirrors]
        assert main(["data", *arguments]) == 0
        assert len(read_cifar10(tmp_path, "train")[0]) == 10
        assert names_in(tmp_path) == ["cifar-10-batches-bin", NAME]
        (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"spoiled")
        kept = (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").stat().st_ino
        assert main(["data", *arguments]) == 0
    assert len(gone.asked) == len(mirror.asked) == 1, "it is mended from what is there"
    assert len(read_cifar10(tmp_path, "test")[0]) == 3
    assert (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").stat().st_ino == kept
    assert "1 file, checked" in capsys.readouterr().out


def test_the_recipe_downloads_what_is_not_there_or_not_all_there(tmp_path, archive, monkeypatch):
    recipe = find_recipe("cifar10")
    options = Cifar10Options(data_dir=str(tmp_path), download=True)
    with Mirror({NAME: archive}) as mirror:
        small = replace(catalog.CATALOG["cifar10"], mirrors=(mirror.url,))
        monkeypatch.setitem(catalog.CATALOG, "cifar10", small)
        assert len(recipe.load_data(options).test[0]) == 3
        (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
        assert len(recipe.load_data(options).test[0]) == 3
        (tmp_path / NAME).unlink()
        recipe.load_data(options)
    assert len(mirror.asked) == 1


def evil(kind, outside):
    box = io.BytesIO()
    with tarfile.open(fileobj=box, mode="w:gz") as tar:
        member = tarfile.TarInfo({"dots": "../out.bin", "link": "link.bin"}.get(kind, "device"))
        if kind == "link":
            member.type, member.linkname = tarfile.SYMTYPE, str(outside)
        elif kind == "device":
            member.type = tarfile.CHRTYPE
        tar.addfile(member)
    return box.getvalue()


@pytest.mark.parametrize("kind", ["dots", "link", "device", "torn", "none"])
def test_an_archive_that_leads_elsewhere_or_is_torn_is_refused(tmp_path, archive, kind):
    folder, outside = tmp_path / "data", tmp_path / "outside"
    folder.mkdir()
    content = {"torn": archive[: len(archive) // 2], "none": b"words"}.get(kind)
    (folder / NAME).write_bytes(content if content is not None else evil(kind, outside))
    with pytest.raises(UserError, match=NAME):
        unpack(folder / NAME, folder)
    assert names_in(folder) == [NAME], "nothing half-unpacked is left"
    assert names_in(tmp_path) == ["data"]
