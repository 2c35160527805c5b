"""The pictures of a run: what is saved at its end, and that nothing recorded depends on it."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, TensorDataset

import samestep
from samestep import Splits, UserError
from samestep.base.run.pictures import LIMIT_BYTES
from samestep.core.session import picture_making as pictures
from tests.api.recipes import made
from tests.command_line import RECIPE, read_json, run, start
from tests.tiny import account


def trained(recipe, folder, **settings):
    return samestep.train(recipe, quiet=True, run_dir=folder / "run", **settings)


def told(one):  # return name → entry of a run's pictures; each file that it names is there
    index = read_json(one.path / "pictures" / "pictures.json")
    assert index["format"] == 1
    for entry in index["pictures"]:
        rows = [*entry.get("right", []), *entry.get("wrong", []), entry]
        for row in rows:
            assert "file" not in row or (one.path / "pictures" / row["file"]).is_file()
    return {entry["name"]: entry for entry in index["pictures"]}


def records(one):
    return {r["name"]: r for r in one.history if r["event"] == "picture"}


def image_recipe(stored):
    """Return a recipe of dark images and bright ones; every tenth is labelled wrong in the test."""
    labels = torch.arange(60) % 2
    noise = torch.rand(stored, generator=torch.Generator().manual_seed(1))
    images = (noise * 60 + labels.view(-1, *[1] * (len(stored) - 1)) * 190).to(torch.uint8)
    targets = torch.where(torch.arange(60) % 10 == 0, 1 - labels, labels)

    def data():
        return Splits(train=(images, labels), test=(images, targets), classes=("dark", "bright"))

    def model():
        return nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), 2))

    settings = {"epochs": 6, "lr": 0.002}
    return made(model, data, settings=settings, transform=lambda x: x.float() / 255 - 0.5)


@pytest.mark.parametrize("stored", [(60, 12, 9), (60, 3, 300, 10), (60, 10, 12, 3)])
def test_images_are_shown_as_stored_right_and_most_confidently_wrong(stored, tmp_path):
    one = trained(image_recipe(stored), tmp_path)
    shown = told(one)["predictions"]
    assert shown["kind"] == "images"
    assert len(shown["right"]) == 16
    assert 0 < len(shown["wrong"]) <= 16
    assert all(row["target"] == row["predicted"] for row in shown["right"])
    assert all(row["target"] != row["predicted"] for row in shown["wrong"])
    assert {row["target"] for row in shown["wrong"]} <= {"dark", "bright"}
    sure = [row["probability"] for row in shown["wrong"]]
    assert sure == sorted(sure, reverse=True)
    for row in (*shown["right"], *shown["wrong"]):
        with Image.open(one.path / "pictures" / row["file"]) as image:
            mean = sum(image.convert("L").tobytes()) / (image.width * image.height)
            assert max(image.size) <= 128
        # What the model says of these is plain to see.
        assert (mean > 128) == (row["predicted"] == "bright")
    with Image.open(one.path / records(one)["predictions"]["path"]) as sheet:
        assert sheet.width > sheet.height or stored == (60, 3, 300, 10)


def test_of_sorted_data_all_classes_are_looked_at_and_zeros_and_ones_are_classes(tmp_path):
    dark, bright = (
        TensorDataset(torch.full((300, 1, 8, 8), 0.1 + 0.8 * label), torch.full((300,), label))
        for label in (0, 1)
    )
    both = ConcatDataset([dark, bright])  # which is read one by one
    recipe = made(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
        data=lambda: Splits(train=both, validation=both),
        settings={"epochs": 1, "batch_size": 30, "lr": 0.05},
    )
    one = trained(recipe, tmp_path)
    assert {row["target"] for row in told(one)["predictions"]["right"]} == {"0", "1"}
    assert read_json(one.path / "pictures" / "pictures.json")["split"] == "validation"

    def data():
        x = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
        y = (x[:, :1] > 0.5).float()
        return Splits(train=(x, y), test=(x, y))

    loss = nn.functional.binary_cross_entropy_with_logits
    one = trained(made(lambda: nn.Linear(2, 1), data, loss=loss), tmp_path / "b", epochs=1)
    assert not (one.path / "pictures").exists()


@pytest.mark.parametrize("flat", [False, True])
def test_numbers_are_shown_predicted_against_actual(flat, tmp_path):
    x = torch.rand(3000, 2, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=not flat) + 2

    def model():
        return nn.Sequential(nn.Linear(2, 1), *[nn.Flatten(0)] * flat)

    recipe = made(
        model=model,
        data=lambda: Splits(train=(x, y), test=(x, y)),
        loss=nn.functional.mse_loss,
        settings={"epochs": 1, "batch_size": 50},
    )
    one = trained(recipe, tmp_path)
    shown = told(one)["regression"]
    assert (shown["kind"], len(shown["points"]), shown["of"]) == ("points", 2000, 3000)
    assert all(2 <= actual <= 4 for actual, _ in shown["points"])
    with torch.no_grad():
        said = samestep.load(one)(x).flatten().tolist()
    assert any(shown["points"][0][1] == pytest.approx(one, rel=1e-4) for one in said)


REVIEWS = [("good" * (n % 2) + f"review {n}", n % 2) for n in range(30)]


def counted(samples):
    lengths = torch.tensor([[float(len(text))] for text, _ in samples])
    return lengths, torch.tensor([label for _, label in samples])


def shows(outputs, _targets):
    return [{"said": int(place), "words": "w" * 5000} for place in outputs.argmax(dim=1)]


def test_rows_say_which_sample_it_is_its_text_its_class_and_what_show_says(tmp_path):
    recipe = made(
        model=lambda: nn.Linear(1, 2),
        data=lambda: Splits(train=REVIEWS, test=REVIEWS, classes=("bad", "fine")),
        collate=counted,
        show=shows,
    )
    one = trained(recipe, tmp_path, epochs=1)
    rows = told(one)["samples"]["rows"]
    assert len({row["sample"] for row in rows}) == len(rows) == 20
    for row in rows:
        text, label = REVIEWS[row["sample"]]
        assert (row["text"], row["target"]) == (text, ("bad", "fine")[label])
        assert row["said"] in (0, 1)
        assert len(row["words"]) <= 400


def figure(model, data):
    """Return the weights."""
    from matplotlib.figure import Figure

    made = Figure()
    made.subplots().plot(model.weight.flatten().tolist())
    assert not torch.is_grad_enabled()
    assert not model.training
    assert model.weight.any()
    assert isinstance(data, Splits)
    torch.rand(3)  # draws, and nothing that is recorded depends on it
    return made


def spoils(model, _data):  # change the model, which does not reach the next picture
    model.train()
    for parameter in model.parameters():
        parameter.zero_()
    return 7


def page(_model, _data):
    return "<p>&lt;hello&gt;</p>"


def raises(_model, _data):
    raise KeyError("no such weight")


def test_a_recipes_own_pictures_are_kept_and_what_fails_is_a_note(tmp_path):
    own = {"number": spoils, "weights": figure, "page": page, "broken": raises}
    one = trained(made(pictures=own), tmp_path)
    assert one.result["status"] == "completed"
    shown = told(one)
    kinds = {name: entry["kind"] for name, entry in shown.items()}
    assert kinds == {"weights": "figure", "page": "html", "broken": "note", "number": "note"}
    assert shown["weights"]["text"] == "The weights."
    folder = one.path / "pictures"
    assert (folder / "weights.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "weights.svg").read_bytes()
    assert (folder / "page.html").read_text() == page(None, None)
    assert "KeyError" in shown["broken"]["text"]
    assert f"{__file__}:" in shown["broken"]["text"]
    assert records(one)["weights"]["path"] == "pictures/weights.png"
    assert records(one)["broken"]["problem"] == shown["broken"]["text"]
    assert "path" not in records(one)["broken"]
    assert "page" not in records(one)


def test_nothing_that_is_recorded_depends_on_pictures(tmp_path):
    own = {"page": page, "broken": raises, "draws": lambda _m, _d: str(torch.rand(1))}
    recipe, found = made(show=shows, pictures=own), []
    for name, wanted in (("with", True), ("without", False)):
        torch.manual_seed(5)
        one = trained(recipe, tmp_path / name, epochs=1, pictures=wanted)
        assert (one.path / "pictures").exists() == wanted
        assert one.history[-1]["event"] == "stop"
        result = [one.result[key] for key in ("weights_sha256", "test", "best", "steps")]
        found.append((result, account(one.path), torch.rand(1)))
    assert found[0] == found[1]


def test_without_matplotlib_a_note_has_the_command(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    one = trained(made(pictures={"weights": figure, "page": page}), tmp_path)
    assert "pip install 'samestep[plot]'" in told(one)["weights"]["text"]
    assert told(one)["page"]["kind"] == "html"


def test_what_does_not_fit_is_a_note_and_the_rest_is_there(tmp_path):
    own = {
        "small": page,
        "large": lambda _m, _d: "x" * (LIMIT_BYTES + 1),
        "later": page,
        "most": lambda _m, _d: "x" * (LIMIT_BYTES - 100_000),
        "last": lambda _m, _d: "x" * 200_000,
    }
    one = trained(made(pictures=own), tmp_path)
    kinds = [entry["kind"] for entry in told(one).values()]
    assert kinds == ["html", "note", "html", "html", "note"]
    size = sum(file.stat().st_size for file in (one.path / "pictures").iterdir())
    assert size <= LIMIT_BYTES


def test_pictures_are_of_the_best_checkpoint_and_of_the_last_end(tmp_path):
    x = torch.ones(40, 1)

    def data():
        return Splits(train=(x, 9 * x), validation=(x, x))

    def weights(model, _data):
        return f"{model.weight.detach().item():.6f}"

    recipe = made(
        model=lambda: nn.Linear(1, 1, bias=False),
        data=data,
        loss=nn.functional.mse_loss,
        pictures={"weights": weights},
        settings={"lr": 0.5, "epochs": 6, "batch_size": 40},
    )
    one = trained(recipe, tmp_path)
    best = read_json(one.path / "checkpoints" / "index.json")["best"]["path"]
    assert best != "checkpoint_epoch_6.pt", "the last weights are others"
    assert read_json(one.path / "pictures" / "pictures.json")["checkpoint"] == best
    known = samestep.load(one, checkpoint="best", recipe=recipe)
    assert (one.path / "pictures" / "weights.html").read_text() == weights(known, None)
    recipe = made(pictures={"first": page})
    one = trained(recipe, tmp_path / "b", epochs=1)
    (one.path / "pictures" / "left.txt").write_text("x")
    (one.path / ".pictures.new").mkdir()  # by a kill
    later = made(pictures={"page": page, "weights": figure})
    samestep.train(one, recipe=later, resume=True, epochs=2, quiet=True)
    names = {path.name for path in (one.path / "pictures").iterdir()}
    assert names == {"page.html", "weights.png", "weights.svg", "pictures.json"}
    assert not [path for path in one.path.iterdir() if path.name.startswith(".pictures")]
    index = read_json(one.path / "pictures" / "pictures.json")
    assert index["checkpoint"] in {path.name for path in (one.path / "checkpoints").iterdir()}
    assert [r["step"] for r in one.history if r["event"] == "picture"] == [one.result["steps"]]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_picture_that_takes_too_long_is_left_out(tmp_path, monkeypatch, interrupted):
    monkeypatch.setattr(pictures, "_LIMIT_S", 100 if interrupted else 2)
    go_on = threading.Event()

    def slow(_model, _data):
        if interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(120)
        return "too late"

    began = time.monotonic()
    one = trained(made(pictures={"page": page, "slow": slow, "after": page}), tmp_path)
    assert time.monotonic() - began < 90
    kinds = {name: entry["kind"] for name, entry in told(one).items()}
    assert kinds == {"page": "html", "slow": "note", "after": "note"}
    assert one.result["status"] == "completed"
    assert one.history[-1]["event"] == "stop"
    go_on.set()  # while its thread waits, `samestep train` would end this process


def test_pictures_that_cannot_be_written_do_not_fail_the_run(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise UserError("The disk is full.")

    monkeypatch.setattr(pictures, "replace_pictures", refuse)
    one = trained(made(pictures={"page": page}), tmp_path)
    assert one.result["status"] == "completed"
    assert "full" in records(one)["pictures"]["problem"]


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "predictions", "x" * 61, 7, None])
def test_a_name_that_no_file_can_have_and_what_is_no_function_is_refused(name):
    with pytest.raises(UserError, match="pictures"):
        made(pictures={"page": "text"} if name is None else {name: page})


def test_on_two_ranks_rank_0_alone_draws(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "import os\nfrom tests.api.recipes import made\n"
        "def page(model, data):\n    return os.environ.get('RANK', '?')\n"
        "recipe = made(pictures={'page': page})\n"
    )
    path = tmp_path / "run"
    run("train", str(recipe), "--run-dir", str(path), world_size=2, folder=tmp_path / "outputs")
    assert (path / "pictures" / "page.html").read_text() == "0"
    assert read_json(path / "result.json")["status"] == "completed"


BROKEN = f"""{RECIPE}
import os
from dataclasses import replace
def busy(model, data):
    x = torch.randn(300, 300)
    while True:
        x = (x @ x).tanh()
def leaves(model, data):
    os.kill(os.getpid(), 9)
"""


def train_with(picture, folder, *flags):
    text = f"{BROKEN}\nrecipe = replace(recipe, pictures={{'{picture}': {picture}}})\n"
    (folder / "odd.py").write_text(text)
    command = ("train", str(folder / "odd.py"), "--run-dir", str(folder / "run"), *flags)
    codes = start(*command, folder=folder / "outputs").wait()
    assert read_json(folder / "run" / "result.json")["status"] == "completed"
    return codes


def test_a_picture_that_still_computes_at_the_end_leaves_the_exit_code_as_it_is(tmp_path):
    assert train_with("busy", tmp_path, "--timeout-s", "2", "--report") == [0]
    assert (tmp_path / "run" / "report.html").is_file()
    (note,) = read_json(tmp_path / "run" / "pictures" / "pictures.json")["pictures"]
    assert (note["name"], note["kind"]) == ("busy", "note")


def test_the_result_is_written_before_a_picture_can_end_the_process(tmp_path):
    assert train_with("leaves", tmp_path) == [-9]
