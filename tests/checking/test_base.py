"""The script from which all planted ones are made."""

from tests.checking.planted import BASE, check, codes


def test_nothing_is_found_in_a_script_without_a_mistake(tmp_path):
    report = check(tmp_path, BASE)
    assert report.findings == []
    assert report.exit_code == 0
    assert report.steps == 4 + 4 + 1  # later epochs end after one batch


ALONE = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 8)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    torch.save(model.state_dict(), "model.pt")
"""


def test_a_script_of_one_process_is_judged_by_the_number_of_ranks_only_if_it_is_given(tmp_path):
    report = check(tmp_path, ALONE, asked=False)
    assert (report.findings, report.exit_code) == ([], 0)
    assert "--nproc 2" in report.notes[-1]
    assert {"SS101", "SS201", "SS501"} <= codes(check(tmp_path, ALONE))
