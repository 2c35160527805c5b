"""The small parts of a tracker's process: what it prints, its ledger, its measurements."""

import json

import pytest

from samestep.errors import UserError
from samestep.tracking import processes
from samestep.tracking.follower import gpus_of, parse_gpus
from samestep.tracking.processes import Deliveries, Delivery, deliveries_path, read_deliveries
from tests.command_line import typed


def test_what_a_tracker_prints_is_logged_without_its_secrets(tmp_path):
    """No secret hides behind quotes, and none is taken for a word of the report itself."""
    program = f"""
import os
from pathlib import Path
from samestep.tracking.follower import Reports
voice = Reports(("planted-secret", "planted", 'pä"55word', "offline"))
print("early planted-secret")
os.write(2, b"of C: http://me:pass@host/ planted\\n")
os.system("echo of a child: planted-secret")
voice.log_to(Path({str(tmp_path / "log")!r}))
voice.tell(failed='planted-secret and pä"55word are wrong', offline=True)
voice.close()
"""
    done = typed("-c", program)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"failed": "… and … are wrong", "offline": True}
    log = (tmp_path / "log").read_text()
    assert sorted(log.splitlines()) == ["early …", "of C: http://host/ …", "of a child: …"]


def test_a_ledger_is_read_as_it_was_written_and_a_damaged_one_is_refused(tmp_path):
    (tmp_path / "tracking").mkdir()
    fresh = read_deliveries(tmp_path, "wandb")
    assert len(fresh.id) == 32
    ledger = Deliveries(
        online=Delivery(run="r", lines=7), offline=Delivery(files=["a"], finished=True)
    )
    processes.write_deliveries(tmp_path, "wandb", ledger)
    assert read_deliveries(tmp_path, "wandb") == ledger
    for text in ("", "{}x", '{"online": 3}'):
        deliveries_path(tmp_path, "wandb").write_text(text)
        with pytest.raises(UserError, match=r"wandb\.json"):
            read_deliveries(tmp_path, "wandb")


def test_a_gpu_is_told_of_by_the_numbers_that_its_driver_knows():
    printed = "GPU-a, 37, 5120, 210.50, 61\nGPU-b, 0, [N/A], [Not Supported], 33\n"
    first = {"utilization_percent": 37.0, "memory_used_mib": 5120.0, "power_w": 210.5}
    assert parse_gpus(printed, None) == {
        "gpu0": first | {"temperature_c": 61.0},
        "gpu1": {"utilization_percent": 0.0, "temperature_c": 33.0},
    }


def test_of_a_machines_gpus_only_those_of_the_ranks_are_told(tmp_path):
    printed = "GPU-aa-1, 1, 2, 3, 4\nGPU-bb-2, 5, 6, 7, 8\nGPU-cc-3, 9, 10, 11, 12\n"
    assert parse_gpus(printed, ["bb-2", "elsewhere"]).keys() == {"gpu1"}
    assert parse_gpus(printed, ["bb-2"])["gpu1"]["memory_used_mib"] == 6.0
    assert parse_gpus(printed, None).keys() == {"gpu0", "gpu1", "gpu2"}
    assert gpus_of(tmp_path) == ()  # a run that has not begun says nothing
    (tmp_path / "environment.json").write_text('{"gpus": ["bb-2"]}')
    assert gpus_of(tmp_path) == ["bb-2"]
    (tmp_path / "environment.json").write_text("{}")
    assert gpus_of(tmp_path) is None
