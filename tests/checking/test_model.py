"""Mistakes in how a model is shared by the ranks."""

import pytest

from tests.checking.planted import BASE, check, codes, line_of, planted

NET = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))"
WRAPPED = f"DDP({NET})"
SAVED = ("torch.save(model.module.state_dict()", "torch.save(model.state_dict()")
BACKWARD = "            loss.backward()\n"
BY_HAND = (
    "            loss.backward()\n            for p in model.parameters():\n"
    "                dist.all_reduce(p.grad)\n                p.grad /= dist.get_world_size()\n"
)
OWN_NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.body(x)


def main():
"""


def unwrapped(*changes: tuple[str, str]) -> str:
    return planted((WRAPPED, NET), SAVED, *changes)


def own_net(*changes: tuple[str, str]) -> str:
    return planted(("def main():\n", OWN_NET), *changes)


def test_models_of_which_each_rank_trains_its_own_are_found(tmp_path):
    text = unwrapped()
    report = check(tmp_path, text)
    (found,) = (f for f in report.findings if f.code == "SS201")
    assert found.line == line_of(text, "loss = loss_of(")
    assert found.severity == "error"
    assert "4 of its 4 parameters" in found.evidence
    assert codes(report) <= {"SS201", "SS309", "SS404"}
    assert report.exit_code == 1


def test_gradients_that_are_averaged_by_hand_are_right(tmp_path):
    report = check(tmp_path, unwrapped((BACKWARD, BY_HAND)))
    assert report.findings == []


def test_weights_that_are_averaged_by_hand_now_and_then_are_right(tmp_path):
    rarely = """\
            with model.no_sync():
                loss = loss_of(model(inputs), labels)
                loss.backward()
            optimizer.step()
            steps += 1
            for p in model.parameters() if steps % 4 == 0 else ():
                dist.all_reduce(p.data, op=dist.ReduceOp.AVG)
"""
    step = "            loss = loss_of(model(inputs), labels)\n            loss.backward()\n"
    text = planted(
        (f"{step}            optimizer.step()\n", rarely),
        ("    best = 0.0\n", "    best = steps = 0\n"),
    )
    report = check(tmp_path, text)
    assert "SS203" not in codes(report)
    assert any(told.startswith("SS203") for told in report.not_seen)


def test_gradients_averaged_by_hand_over_unequal_weights_are_found(tmp_path):
    seeded = ("torch.manual_seed(0)", "torch.manual_seed(rank)")
    text = unwrapped((BACKWARD, BY_HAND), seeded)
    report = check(tmp_path, text)
    (found,) = (f for f in report.findings if f.code == "SS202")
    assert found.line == line_of(text, "loss = loss_of(")
    assert "4 of 4 parameters" in found.evidence
    assert not codes(report) & {"SS201", "SS203"}


def test_a_checkpoint_that_one_rank_loads_after_wrapping_is_found(tmp_path):
    line = "    optimizer = torch.optim.SGD"
    late = f"    if rank == 0:\n        nn.init.zeros_(model.module[0].bias)\n{line}"
    report = check(tmp_path, planted((line, late)))
    (found,) = (f for f in report.findings if f.code == "SS202")
    assert "1 of 4 parameters" in found.evidence
    assert "0.bias" in found.evidence


@pytest.mark.parametrize(
    ("change", "cause", "count"),
    [
        (("lr=0.1", "lr=0.1 + 0.1 * rank"), "0.1, 0.2", "4 of 4"),
        (
            (
                "            optimizer.step()",
                "            model.module[2].bias.grad *= 1 + rank\n            optimizer.step()",
            ),
            "2.bias already differed",
            "1 of 4",
        ),
    ],
    ids=["learning rates", "gradients"],
)
def test_weights_that_drift_apart_are_found_with_the_first_step(tmp_path, change, cause, count):
    text = planted(change)
    report = check(tmp_path, text)
    (found,) = (f for f in report.findings if f.code == "SS203")
    assert found.line == line_of(text, "optimizer.step()")
    assert "step 1" in found.evidence
    assert count in found.evidence
    assert cause in found.evidence
    assert not codes(report) & {"SS201", "SS202", "SS204"}


def test_a_forward_pass_that_goes_past_the_wrapper_is_found(tmp_path):
    text = planted(("loss_of(model(inputs), labels)", "loss_of(model.module(inputs), labels)"))
    report = check(tmp_path, text)
    (found,) = (f for f in report.findings if f.code == "SS204")
    assert found.line == line_of(text, "model.module(inputs)")
    assert "+ loss = loss_of(model(inputs), labels)" in found.remedy
    assert not codes(report) & {"SS201", "SS202", "SS203"}
    assert report.exit_code == 1


def test_batch_normalisation_over_few_samples_is_advice(tmp_path):
    few = planted(("nn.ReLU()", "nn.BatchNorm1d(16), nn.ReLU()"))
    report = check(tmp_path, few)
    (found,) = (f for f in report.findings if f.code == "SS205")
    assert found.line == line_of(few, "model = DDP(")
    assert "8 samples" in found.evidence
    assert report.exit_code == 0
    many = planted(
        ("DataLoader(train_set, batch_size=8", "DataLoader(train_set, batch_size=16"), base=few
    )
    assert codes(check(tmp_path, many)) == set()


def test_a_buffer_that_one_rank_changes_is_found_where_ddp_does_not_broadcast(tmp_path):
    step = "            optimizer.step()\n"
    once = f"{step}            if rank == 0:\n                model.module.seen += 1\n"
    text = own_net(
        (WRAPPED, "DDP(Net(), broadcast_buffers=False, find_unused_parameters=True)"), (step, once)
    )
    report = check(tmp_path, text)
    assert codes(report) == {"SS206"}
    (found,) = report.findings
    assert found.line == line_of(text, "model = DDP(")
    assert "seen" in found.evidence
    assert "only rank 0" in found.evidence
    assert report.exit_code == 1
    right = planted((", broadcast_buffers=False", ""), base=text)
    assert codes(check(tmp_path, right)) == set()


def test_parameters_that_no_loss_reaches_are_found_although_the_script_fails(tmp_path):
    text = own_net((WRAPPED, "DDP(Net())"))
    report = check(tmp_path, text)
    assert codes(report) == {"SS207"}
    (found,) = report.findings
    assert found.line == line_of(text, "model = DDP(")
    assert "2 of 4 parameters" in found.evidence
    assert "spare.weight" in found.evidence
    assert report.exit_code == 1


def test_looking_for_unused_parameters_where_there_are_none_is_advice(tmp_path):
    text = planted((WRAPPED, f"DDP({NET}, find_unused_parameters=True)"))
    report = check(tmp_path, text)
    assert codes(report) == {"SS208"}
    (found,) = report.findings
    assert found.line == line_of(text, "model = DDP(")
    assert f"+ model = {WRAPPED}" in found.remedy
    assert report.exit_code == 0


def test_one_process_is_asked_nothing_about_ranks(tmp_path):
    assert check(tmp_path, unwrapped(), nproc=1).findings == []
    assert "SS201" not in codes(check(tmp_path, BASE, nproc=1))
