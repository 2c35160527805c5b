"""Values that a rank hands back reach the process that started it, also if the rank is killed."""

from samestep.ranks.process import TASK, hand_back, handed_back


def test_values_come_in_order_without_one_that_was_cut_short(tmp_path, monkeypatch):
    task = tmp_path / "task"
    monkeypatch.setenv(TASK, str(task))
    assert handed_back(task, 0) == []
    hand_back({"loss": 0.5})
    hand_back(["a", "b"])
    assert handed_back(task, 0) == [{"loss": 0.5}, ["a", "b"]]
    assert handed_back(task, 1) == []
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert handed_back(task, 0) == [{"loss": 0.5}]
