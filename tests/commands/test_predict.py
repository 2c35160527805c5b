"""`samestep train images` and `samestep predict`: from folders of files to named classes."""

import json
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image

import samestep
from samestep.core.recipe import find_recipe
from samestep.core.recipes.images import ImagesOptions, complete
from samestep.core.session.request import draft
from samestep.shell.commands.predict import _write_table
from tests.command_line import RECIPE, call, read_json, run, start, train_here
from tests.image_files import BROKEN, write_images
from tests.tiny import all_records, num_records, until

SMALL = ("--width", "2", "--batch-size", "8", "--epochs", "2", "--threads", "1")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with data in it, one image broken, and a finished run on 2 ranks."""
    folder = tmp_path_factory.mktemp("images")
    root = write_images(folder / "data", count=12)
    write_images(root, "test", count=3)
    (root / "train" / "dog" / "broken.png").write_text("no image")
    flags = ("--data-dir", str(root), "--run-dir", str(folder / "run"), *SMALL)
    more = ("--max-corrupt", "0.1", "--cache", "memory")
    run("train", "images", *flags, *more, world_size=2, folder=folder / "output")
    return folder


def predict(capsys, *arguments) -> tuple[int, str]:
    code = call("predict", *map(str, arguments))
    return code, capsys.readouterr().out


def test_the_run_keeps_what_the_data_told_and_each_file_gets_its_classes(place, capsys):
    options = draft(str(place / "run")).options()
    assert options.classes == ("cat", "dog")
    assert options.image_size == 20
    start = all_records(place / "run")[0]
    (left_out,) = start["left_out"]
    assert left_out.startswith("train/dog/broken.png: ")
    assert any("1 of 31 images" in note for note in start["notes"])
    assert any("memory" in note and "31 images" in note for note in start["notes"])
    test = read_json(place / "run" / "result.json")["test"]
    assert test["samples"] == 6
    assert test["per_class"].keys() == {"cat", "dog"}
    files = sorted((place / "data" / "test").rglob("*.*"))
    code, shown = predict(capsys, place / "run", *files, "--json")
    assert code == 0
    tables = [json.loads(line) for line in shown.splitlines()]
    assert [table["file"] for table in tables] == [str(file) for file in files]
    for table in tables:
        assert {c["class"] for c in table["classes"]} == {"cat", "dog"}
        probabilities = [c["probability"] for c in table["classes"]]
        assert probabilities == sorted(probabilities, reverse=True)
        assert abs(sum(probabilities) - 1) < 1e-9
    right = sum(t["classes"][0]["class"] == Path(t["file"]).parent.name for t in tables)
    assert right / 6 == test["accuracy"], "it predicts what the evaluation measured"


def test_a_split_is_predicted_as_evaluated_and_goes_into_tables(place, capsys, tmp_path):
    of_test = place / "run", "--split", "test"
    rows = [json.loads(line) for line in predict(capsys, *of_test, "--json")[1].splitlines()]
    assert samestep.predict(place / "run", split="test") == rows
    assert [(row["split"], row["row"]) for row in rows] == [("test", n) for n in range(1, 7)]
    best = [row["classes"][0]["class"] for row in rows]
    right = sum(name == row["target"] for name, row in zip(best, rows, strict=True))
    assert right / 6 == read_json(place / "run" / "result.json")["test"]["accuracy"]
    files = [tmp_path / f"rows.{end}" for end in ("jsonl", "csv", "parquet")]
    for file in files:
        assert predict(capsys, *of_test, "--out", file)[0] == 0
    assert [json.loads(line) for line in files[0].read_text().splitlines()] == rows
    for table in (pd.read_csv(files[1]), pd.read_parquet(files[2])):
        assert [*table["class"]] == best
        assert {"split", "row", "target", "probability", "class_2"} <= {*table.columns}
    _write_table(files[2], [{"output": [[0.5], 1]}, {"output": {}}])  # of no type in common
    assert [*pd.read_parquet(files[2])["output"]] == ["[[0.5], 1]", "{}"]


def test_a_broken_file_is_named_and_others_of_any_size_and_mode_predicted(place, capsys, tmp_path):
    Image.new("L", (300, 70), 9).save(tmp_path / "grey.jpg")
    Image.new("RGBA", (3, 5), (1, 2, 3, 4)).save(tmp_path / "tiny.png")
    good = [tmp_path / "grey.jpg", tmp_path / "tiny.png"]
    broken = [tmp_path / f"broken-{number}.jpg" for number in range(3)]
    for path, (write_it, _) in zip(broken, BROKEN.values(), strict=False):
        write_it(path)
    code, shown = predict(capsys, place / "run", good[0], *broken, good[1], "--top", "1")
    assert code == 1
    for path in (*good, *broken):
        assert shown.count(f"{path}\n") == 1
    assert shown.count("\n  0.") + shown.count("\n  1.") == 2, "--top 1 names one class a file"
    code, shown = predict(capsys, place / "run", broken[0], "--json")
    assert code == 1
    told = json.loads(shown)
    assert told.keys() == {"file", "problem"}
    assert told["file"] == str(broken[0])
    code, shown = predict(capsys, place / "run", good[0], broken[0], "--out", tmp_path / "a.csv")
    assert (code, "wrote    1 prediction to" in shown, "1 failed" in shown) == (1, 1, 1)


@pytest.fixture(scope="module")
def readless(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("readless")
    (folder / "small.py").write_text(RECIPE)
    recipe = str(folder / "small.py")
    train_here(recipe, "--max-steps", "1", "--run-dir", str(folder / "run"))
    return str(folder / "run")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("RUN DATA", "DATA"),
        ("RUN", "files"),
        ("RUN IMAGE --top 0", "--top"),
        ("RUN IMAGE --split test", "--split test and files"),
        ("RUN IMAGE --data-dir DATA", "--data-dir goes with --split"),
        ("RUN --split test --out rows.xls", ".parquet"),
        ("RUN IMAGE --checkpoint nope", "'nope'"),
        ("EMPTY IMAGE", "EMPTY"),
        ("READLESS IMAGE", "small"),
    ],
)
def test_what_predict_cannot_do_is_one_message(place, readless, refused, tmp_path, arguments, says):
    image = place / "data" / "test" / "cat" / "001.png"
    places = {"RUN": place / "run", "DATA": place / "data", "IMAGE": image, "EMPTY": tmp_path}
    places["READLESS"] = readless
    message = refused("predict", *(str(places.get(word, word)) for word in arguments.split()))
    assert str(places.get(says, says)) in message


def test_evaluate_reads_only_its_split_and_checks_the_classes(place, refused, tmp_path, output_of):
    (tmp_path / "other" / "train").mkdir(parents=True)
    root = write_images(tmp_path / "other", classes=("cat", "emu"))
    write_images(root, "test", classes=("cat", "emu"))
    message = refused("evaluate", str(place / "run"), "--data-dir", str(root))
    assert "train/emu" in message
    assert "cat, dog" in message
    found = output_of("evaluate", place / "run", "--json", "--split", "validation")
    assert json.loads(found)["samples"] == 2


def test_a_mistake_in_the_folder_or_in_what_is_asked_of_it_is_one_message(refused, tmp_path):
    root = write_images(tmp_path / "data", count=8)
    (root / "train" / "emu").mkdir()
    train = ("train", "images", "--data-dir", str(root), "--run-dir", str(tmp_path / "run"))
    assert "train/emu" in refused(*train)
    (root / "train" / "emu").rmdir()
    (root / "train" / "cat" / "broken.jpg").write_bytes(b"")
    message = refused(*train, "--max-corrupt", "0.05")
    assert "1 of 17 images" in message
    assert "--max-corrupt 0.05" in message
    assert "--image-size" in refused(*train, "--image-size", "4")
    fractions = ("--validation-fraction", "0.5", "--test-fraction", "0.5")
    assert "--validation-fraction" in refused(*train, *fractions)
    assert not (tmp_path / "run" / "settings.toml").exists()


def test_a_command_that_is_repeated_goes_on_with_the_classes_of_its_run(place, tmp_path):
    flags = ("--data-dir", str(place / "data"), "--run-dir", str(tmp_path / "run"))
    for more in (("--max-steps", "1"), ("--max-steps", "2", "--cache", "off")):
        train_here("images", *flags, "--max-corrupt", "0.1", *SMALL, "--resume", *more)
    assert [r["step"] for r in all_records(tmp_path / "run") if r["event"] == "stop"] == [1, 2]


def test_a_killed_job_leaves_nothing_in_shared_memory(place, tmp_path):
    def named() -> set[Path]:
        return set(Path("/dev/shm").glob("*samestep*"))

    before = named()
    flags = ("--data-dir", str(place / "data"), "--run-dir", str(tmp_path / "run"), *SMALL)
    more = "--max-corrupt 0.1 --cache memory --epochs 100000 --log-every 1"
    arguments = ("train", "images", *flags, *more.split())
    ranks = start(*arguments, world_size=2, folder=tmp_path / "output")
    until(lambda: num_records(tmp_path / "run") > 3, ranks)
    until(lambda: named() <= before, ranks)  # there is no name by which it could stay
    ranks.kill()
    assert ranks.wait() == [-signal.SIGKILL] * 2
    until(lambda: named() <= before)


@pytest.mark.parametrize(
    ("edges", "expected"), [((32, 32), 32), ((64, 48), 48), ((65, 90), 160), ((500, 300), 160)]
)
def test_the_image_size_follows_what_is_there(tmp_path, edges, expected):
    root = write_images(tmp_path, count=3, size=edges)
    (root / "train" / "cat" / "aaa.png").write_bytes(b"")
    options = complete(ImagesOptions(data_dir=str(root)))
    assert options.image_size == expected
    assert complete(ImagesOptions(data_dir=str(root), image_size=24)).image_size == 24


def test_a_tenth_each_is_held_out_and_the_model_sees_the_size_asked_for(tmp_path):
    root = write_images(tmp_path, count=10)
    recipe = find_recipe("images")
    splits = recipe.load_data(complete(ImagesOptions(data_dir=str(root))))
    assert [len(s) for s in (splits.train, splits.validation, splits.test)] == [16, 2, 2]
    write_images(root, "val", count=2)
    splits = recipe.load_data(complete(ImagesOptions(data_dir=str(root), test_fraction=0.0)))
    assert [len(splits.train), len(splits.validation)] == [20, 4]
    assert splits.test is None
    recipe = find_recipe("images")
    options = complete(ImagesOptions(data_dir=str(write_images(tmp_path / "b")), image_size=96))
    stored = recipe.read(options, tmp_path / "b" / "train" / "cat" / "001.png")[None]
    assert recipe.transform(recipe.augment(stored, torch.arange(1))).shape == (1, 3, 96, 96)
    assert recipe.transform(stored).shape == (1, 3, 96, 96)
    assert recipe.transform(stored).dtype == torch.float32
