"""What the result of a whole run says, and which checkpoint is tested."""

import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import read_json

FIELDS = {
    *("recipe", "status", "reason", "world_size", "global_batch_size", "epochs", "steps", "test"),
    *("best", "training_seconds", "samples_per_s", "seconds_to_first_step", "device", "backend"),
    *("versions", "weights_sha256", "peak_memory_bytes"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    tiny.trained(tiny.write_recipe(folder), folder / "run")
    return folder / "run"


def test_a_result_has_these_fields_and_the_best_epochs_value(finished):
    result = read_json(finished / "result.json")
    assert result.keys() == FIELDS
    assert (result["status"], result["reason"]) == ("completed", "finished")
    assert (result["epochs"], result["steps"]) == (6, tiny.STEPS)
    values = {
        r["epoch"]: r["accuracy"] for r in tiny.account(finished) if r.get("split") == "validation"
    }
    assert result["best"]["value"] == values[result["best"]["epoch"]] == max(values.values())
    assert 50e6 < result["peak_memory_bytes"] < 50e9
    assert result["samples_per_s"] == pytest.approx(6 * 131 / result["training_seconds"])
    best = tiny.read_index(finished)["best"]
    assert result["test"]["checkpoint"] == best["path"]
    assert result["best"]["epoch"] == best["epoch"]
    assert result["test"]["samples"] == 41


def test_where_the_best_checkpoint_is_damaged_the_next_best_is_tested_and_it_is_told(
    finished, tmp_path
):
    run = shutil.copytree(finished, tmp_path / "run")
    best = tiny.read_index(run)["best"]["path"]
    (run / "checkpoints" / best).write_bytes(b"")
    tiny.resumed(run)
    *_, tested = (r for r in tiny.all_records(run) if r.get("split") == "test")
    assert any(best in problem for problem in tested["problems"])
    assert tested["checkpoint"] != best
    test = read_json(run / "result.json")["test"]
    assert test["checkpoint"] == tested["checkpoint"]
