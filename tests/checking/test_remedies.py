"""The change that a finding prints: once it is made, the finding is gone."""

import pytest
import torch

from tests.checking import test_data, test_files, test_model, test_one_process, test_step
from tests.checking.planted import check, codes, planted, remedied

PRINTED = {
    "SS101": test_data.unsampled(),
    "SS103": planted((test_data.SET_EPOCH, "")),
    "SS204": test_model.PAST_DDP,
    "SS208": test_model.SEARCHED,
    "SS302": test_step.CLIPS_SCALED,
    "SS310": test_step.PLANTED["scaled gradients"][0],
    "SS314": test_step.NOT_DIVIDED,
    "SS704": planted((test_one_process.ZERO, "")),
    "SS714": test_one_process.LOADS_ITSELF,
}


@pytest.mark.parametrize("code", PRINTED)
def test_the_change_that_a_finding_prints_mends_it(code, tmp_path):
    text = PRINTED[code]
    (found,) = (one for one in check(tmp_path, text).findings if one.code == code)
    text = remedied(text, found).replace("import os\n", "import copy\nimport os\n", 1)
    assert code not in codes(check(tmp_path, text))


FILES = """
torch.save(model.module.state_dict(), "all.pt")
if rank == 0: torch.save(model.state_dict(), "wrapped.pt")
torch.load("best.pt")
torch.load("given.pt", weights_only=False, map_location="cpu")
import wandb
wandb.init()
from tqdm import tqdm
bar = tqdm(range(3),)
"""


def test_the_changes_that_findings_about_files_print_mend_them(tmp_path):
    test_files.with_fakes(tmp_path)
    torch.save({"layer.weight": torch.zeros(1)}, tmp_path / "project" / "given.pt")
    text = test_files.at_the_end(FILES)
    found = sorted(check(tmp_path, text).findings, key=lambda one: -one.line)
    assert [int(one.code[2:]) for one in found] == [508, 507, 505, 504, 503, 501]
    for one in found:
        text = remedied(text, one)
    assert check(tmp_path, text).findings == []
