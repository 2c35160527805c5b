"""A recipe that calls exit() ends the run as a mistake, with its line, on any number of ranks."""

import json

import pytest

from tests.command_line import RECIPE, end_with_first_failure, one_message, start
from tests.tiny import all_records

WAYS = {
    "the file": (lambda text: text + "\nimport sys\nsys.exit(0)\n", "sys.exit(0)"),
    "data()": (lambda text: text.replace("def data():", "def data():\n    exit()"), "exit()"),
    "the loss": (
        lambda text: text.replace(
            "recipe = Recipe(",
            "seen = []\n\ndef loss(outputs, targets):\n    seen.append(1)\n"
            "    if len(seen) == 9:\n        raise SystemExit(3)\n"
            "    return nn.functional.cross_entropy(outputs, targets)\n\n"
            "recipe = Recipe(loss=loss, ",
        ),
        "    raise SystemExit(3)",
    ),
}


@pytest.mark.parametrize(("way", "world_size"), [*((way, 1) for way in WAYS), ("the loss", 2)])
def test_exit_in_a_recipe_is_a_mistake_that_names_the_line(tmp_path, way, world_size):
    change, line = WAYS[way]
    path = tmp_path / "mine.py"
    path.write_text(change(RECIPE))
    number = path.read_text().splitlines().index(line if way == "the file" else f"    {line}") + 1
    run = tmp_path / "run"
    arguments = ("train", str(path), "--run-dir", str(run))
    ranks = start(*arguments, world_size=world_size, folder=tmp_path / "output")
    told = one_message(end_with_first_failure(ranks), ranks.output())
    assert f"{path}:{number}" in told
    if way == "the loss":
        assert all_records(run)[-1]["event"] == "stop"
        assert json.loads((run / "result.json").read_text())["status"] == "failed"
    else:
        assert not run.exists()
