"""Scripts whose evaluation does not tell of the whole, or in the wrong mode."""

import pytest

from tests.checking.planted import BASE, check, codes, line_of, planted

MODEL = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))"
DROPOUT = (MODEL, "nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))")
UNREDUCED = ("        dist.all_reduce(counts)\n", "")
NO_BEST = (
    """\
        if accuracy > best:
            best = accuracy
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
""",
    "",
)
WHOLE = (
    "val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)",
    "val_loader = DataLoader(val_set, batch_size=8)",
)
UNEQUAL = (
    "val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)",
    (
        "val_loader = DataLoader(torch.utils.data.Subset(val_set, range(0, 24) if rank else "
        "range(24, 32)), batch_size=8)"
    ),
)


def only(report, code):
    """Return the only finding of a report, which has this code."""
    (found,) = report.findings
    assert found.code == code
    return found


def test_the_number_of_one_shard_shown_as_the_whole_is_found(tmp_path):
    text = planted(UNREDUCED, NO_BEST)
    report = check(tmp_path, text)
    found = only(report, "SS401")
    assert found.line == line_of(text, "print(")
    assert "rank 0 evaluated 16 samples, rank 1 another 16" in found.evidence
    assert report.exit_code == 1


@pytest.mark.parametrize(
    "changes",
    [
        (UNREDUCED, WHOLE),
        (UNREDUCED, (WHOLE[0], WHOLE[1].replace("=8)", "=8, shuffle=True)"))),
        (
            UNREDUCED,
            ('"best.pt"', '"last.pt"'),  # whatever the number
            (
                '        if rank == 0:\n            print(f"epoch',
                '        if True:\n            print(f"rank {rank} epoch',
            ),
        ),
        (
            (
                "        dist.all_reduce(counts)\n",
                (
                    "        joined = [None, None]\n"
                    "        dist.all_gather_object(joined, counts)\n        counts = sum(joined)\n"
                ),
            ),
        ),
        (UNEQUAL, NO_BEST),
    ],
    ids=["all of it on each rank", "shuffled", "labelled", "gathered", "unequal, with counts"],
)
def test_a_number_of_the_whole_or_of_a_named_rank_is_right(changes, tmp_path):
    assert codes(check(tmp_path, planted(*changes))) <= {"SS107", "SS104"}


def test_a_mean_of_means_over_unequal_counts_is_found(tmp_path):
    text = planted(
        UNEQUAL,
        NO_BEST,
        (
            "        dist.all_reduce(counts)\n",
            "        mean = counts[0] / counts[1]\n        dist.all_reduce(mean)\n",
        ),
        ("float(counts[0] / counts[1])", "float(mean / 2)"),
    )
    found = only(check(tmp_path, text), "SS402")
    assert found.line == line_of(text, "dist.all_reduce(mean)")
    assert "of 8 and 24 samples" in found.evidence


def alone(model):
    """Return a script that evaluates on rank 0 only."""
    return planted(
        WHOLE,
        UNREDUCED,
        NO_BEST,
        (MODEL, "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))"),
        (
            "            for inputs, labels in val_loader:",
            "            for inputs, labels in val_loader if rank == 0 else ():",
        ),
        ("right = model(inputs)", f"right = {model}(inputs)"),
    )


def test_evaluation_on_one_rank_inside_the_wrapper_is_found(tmp_path):
    text = alone("model")
    report = check(tmp_path, text)
    assert "SS403" in codes(report)
    found = next(f for f in report.findings if f.code == "SS403")
    assert found.line == line_of(text, "right = model(inputs)")


def test_evaluation_on_one_rank_beside_the_wrapper_is_right(tmp_path):
    report = check(tmp_path, alone("model.module"))
    assert [f for f in report.findings if f.severity != "advice"] == []


def test_a_shard_that_one_rank_evaluates_alone_is_found(tmp_path):
    text = alone("model.module").replace("batch_size=8)\n", "batch_size=8, sampler=val_sampler)\n")
    found = next(f for f in check(tmp_path, text).findings if f.severity != "advice")
    assert found.code == "SS401"
    assert found.line == line_of(text, "print(")
    assert "16 of 32 samples" in found.evidence


def test_the_best_by_the_number_of_one_shard_is_found(tmp_path):
    text = planted(
        ("        dist.all_reduce(counts)\n", ""),
        ("        dist.barrier()\n", "        dist.all_reduce(counts)\n"),
        ('            print(f"epoch {epoch}: accuracy {accuracy:.3f}")\n', "            pass\n"),
    )
    found = only(check(tmp_path, text), "SS404")
    assert found.line == line_of(text, "torch.save(")
    assert "rank 0 evaluated 16 samples, rank 1 another 16" in found.evidence


def test_evaluation_mode_that_is_left_on_is_found(tmp_path):
    text = planted(DROPOUT, ("        model.train()\n", ""))
    found = only(check(tmp_path, text), "SS706")
    assert found.line == line_of(text, "loss = loss_of(model(inputs)")
    assert "from step 5 on" in found.evidence


def test_training_mode_in_evaluation_is_found(tmp_path):
    text = planted(DROPOUT, ("        model.eval()\n", ""))
    found = only(check(tmp_path, text), "SS707")
    assert found.line == line_of(text, "right = model(inputs)")
    assert "1 of 1 layers" in found.evidence


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_mode_that_no_layer_depends_on_is_silent(mode, tmp_path):
    assert check(tmp_path, planted((f"        model.{mode}()\n", ""))).findings == []


def test_evaluation_with_gradients_is_advice(tmp_path):
    text = planted(("with torch.no_grad():", "if True:"))
    report = check(tmp_path, text)
    found = only(report, "SS709")
    assert found.line == line_of(text, "right = model(inputs)")
    assert report.exit_code == 0


def test_statistics_that_are_computed_anew_are_no_evaluation(tmp_path):
    text = planted(
        (MODEL, "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))"),
        (
            "    del model, optimizer, scheduler\n",
            "    torch.optim.swa_utils.update_bn(DataLoader(train_set, batch_size=8), model)\n",
        ),
    )
    assert "SS707" not in codes(check(tmp_path, text))


def test_the_clean_script_has_no_finding_of_its_evaluation(tmp_path):
    assert check(tmp_path, BASE).findings == []
