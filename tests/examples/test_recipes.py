"""The examples that are recipes: `samestep verify` passes them, and each does what it says."""

import json
import re
import sys

import pytest

from samestep import read_records
from samestep.prove.verification import causes
from samestep.shell.cli import main
from tests import tiny
from tests.examples.programs import ROOT
from tests.verification.forked import check, differing, verified

EXAMPLES = ROOT / "examples"
SMALL = {
    "char_gpt": ("--dim", "8", "--heads", "2", "--layers", "1"),
    "csv_regression": ("--hidden", "8"),
    "graphs": ("--num-graphs", "60", "--width", "4"),
    "huggingface": ("--num-reviews", "60", "--width", "8", "--layers", "1"),
    "padded_text": ("--num-sentences", "60", "--width", "8"),
}
# Their loss is a mean over samples, so Lightning's Trainer takes them, too.
IN_LIGHTNING = ("csv_regression", "graphs", "huggingface")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_verify_finds_the_same_training_and_nothing_to_accept(name, tmp_path):
    lightning = name in IN_LIGHTNING
    recipe, ranks = EXAMPLES / f"{name}.py", tmp_path / "ranks"
    found = verified(recipe, *SMALL[name], folder=ranks, lightning=lightning)
    assert found.same, [(c.name, c.cause) for c in found.checks if not c.passed]
    assert differing(found) == {}
    assert {c.status for c in found.checks} <= {"same", "skipped"}
    for row in ("2 ranks", "accumulation", "stop and resume", "samples apart", "loss"):
        assert check(found, row).status == "same", row
    assert check(found, "lightning").status == ("same" if lightning else "skipped")


@pytest.mark.slow
def test_verify_points_to_loss_terms_where_a_mean_over_words_lacks_them(tmp_path):
    text = (EXAMPLES / "padded_text.py").read_text()
    recipe = tmp_path / "without_terms.py"
    recipe.write_text(text.replace("    loss_terms=", "    # loss_terms="))
    found = verified(recipe, *SMALL["padded_text"], folder=tmp_path / "ranks")
    assert not found.same
    assert differing(found)["2 ranks"] == causes.NOT_A_MEAN.name
    assert "loss_terms" in check(found, "loss").cause.advice


@pytest.mark.slow
def test_the_gpt_beats_a_model_that_counts_pairs_of_characters(tmp_path):
    run = tmp_path / "run"
    flags = ("--max-steps", "60", "--seed", "0", "--threads", "1")
    tiny.trained(EXAMPLES / "char_gpt.py", run, *flags)
    records = list(read_records(run))
    (note,) = next(r["notes"] for r in records if r["event"] == "start")
    bigram = float(re.search(r"(\d+\.\d+)\.$", note).group(1))
    (evaluated,) = (r["loss"] for r in records if r["event"] == "evaluation")
    assert 0.5 < evaluated < bigram < 1.5, "made-up sentences have some entropy"


@pytest.mark.slow
def test_the_hugging_face_model_learns_what_not_means(tmp_path, capsys):
    run = tmp_path / "run"
    flags = ("--epochs", "5", "--seed", "0", "--threads", "1")
    tiny.trained(EXAMPLES / "huggingface.py", run, *flags)
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("the film was not bad\nvery good\nthe plot was not great\n")
    assert main(["predict", str(run), str(sentences), "--top", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == [1, 2, 3]
    assert [row["classes"][0]["class"] for row in rows] == ["good", "good", "bad"]


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("graphs", "torch_geometric", "graphs"), ("huggingface", "transformers", "huggingface")],
)
def test_a_missing_package_is_told_with_its_install(refused, monkeypatch, name, package, extra):
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    message = refused("train", str(EXAMPLES / f"{name}.py"))
    assert package in message
    assert f"pip install 'samestep[{extra}]'" in message
