"""What a verb cannot do is refused with one message, which names it, and leaves nothing behind."""

import sys

import pytest

from tests import tiny
from tests.command_line import tree
from tests.loops.scripts import EXAMPLES
from tests.reporting.made_runs import write_run
from tests.tracking.test_following import TRACKER
from tests.verification import planted


@pytest.fixture
def here(here):
    """A folder with recipes, a script, three runs, and another folder."""
    planted.write(here, name="good.py")
    tiny.write_recipe(here)
    (here / "train.py").write_text("import torch\nopen('began', 'w')\n")
    for name in ("run", "runs/one", "runs/two"):
        write_run(here / name)
    (here / "full").mkdir()
    (here / "full" / "file").touch()
    return here


# A command, and what of it or of what may be chosen the message names.
REFUSED = [
    ("check nothing.py", "nothing.py"),
    ("check train.py --steps 0", "--steps"),
    ("check train.py --resume", "auto"),
    ("check train.py --here --nproc 2", "--nproc"),
    ("check --resume auto --here --resume-nproc 1 train.py", "--resume-nproc"),
    ("check --resume --again train.py --steps 3", "--steps"),
    ("check train.py --resume auto --resume-nproc 1,none", "--resume-nproc"),
    ("check train.py --resume-nproc 2", "--resume"),
    ('check train.py --resume --again="out', "No closing quotation"),
    ("check -m", "-m"),
    ("check -m no.such.module", "no.such.module"),
    ("check --json", "--json"),
    ("check --list SS999", "SS999"),
    ("check train.py --sarif nowhere/found.sarif", "nowhere"),
    ("compare runs/one runs/two --metric bleu", "'bleu'"),
    ("compare runs/one runs/two --plot a.txt", "--plot a.txt"),
    ("compare runs/one runs/two --plot a.png", "pip install 'samestep[plot]'"),
    ("completion csh", "fish"),
    ("completion bash zsh", "fish"),
    ("data get fashion_mnist --data-dir .", "'fashion-mnist'"),
    ("data put", "get, list"),
    ("demo --runs /dev/null/x", "--runs /dev/null/x"),
    ("explain spiral --nproc 0", "--nproc"),
    ("explain spiral --nodes 0", "--nodes"),
    ("explain spiral --nproc 999 --nodes 999", "4096"),
    ("explain spiral --new --resume", "--new"),
    ("explain spiral --nproc 7001", "7001"),
    ("explain spiral --virtual-ranks 2 --nproc 3", "--virtual-ranks"),
    ("explain spiral --backend nccl --device cpu --nproc 2", "--backend"),
    ("profile train.py --workers 0,1", "--workers"),
    ("profile train.py --epoch 0", "--epoch is 0"),
    ("profile train.py --steps 1", "--steps is 1"),
    ("profile train.py --lr 1", "--lr is not a flag"),
    ("profile train.py --out /dev/null/x", "/dev/null/x"),
    ("profile tiny.py --workers 0,x", "--workers 0,x"),
    ("profile tiny.py --batch-sizes 0", "--batch-sizes 0"),
    ("profile tiny.py --apply", "--apply"),
    ("profile tiny.py --engine lightning", "--engine"),
    ("profile tiny.py -- x", "`--`"),
    ("profile tiny.py --run-dir /dev/null/x", "/dev/null/x"),
    ("profile gone.py", "gone.py"),
    ("report", "samestep report"),
    ("report nowhere", "nowhere"),
    ("report run -o .", "-o"),
    ("report run -o no/such/page.html", "no/such"),
    ("report run run", "run"),
    ("report run -o run/events.jsonl", "events.jsonl"),
    ("runs runs/one", "samestep runs runs"),
    ("runs nothing", "nothing"),
    ("scale spiral --epochs 3", "--epochs"),
    ("scale spiral --seconds 0", "--seconds is 0.0"),
    ("scale spiral --engine lightning", "--engine"),
    ("scale spiral --mode strong --nproc 1,5 --batch-size 4", "--batch-size 4"),
    ("scale spiral --run-dir full", "full"),
    ("scale --nproc 1,2", "before --nproc:"),
    ("track run --to wanb", "'wandb'"),
    (f"track run --to {TRACKER} --project a/b", "--track-project 'a/b'"),
    ("track run --to none", "--to none"),
    ("track run", "--to"),
    ("train spiral --max_epochs=3", "use --epochs"),
    ("train tiny.py --halving 3", "--halving"),
    ("train tiny.py --smoke --run-dir new --resume", "--resume"),
    ("verify --json", "--json"),
    ("verify spirla", "'spiral'"),
    ("verify good.py --nproc 1000", "1 to 64"),
    ("verify good.py --accept batchnrom", "'batchnorm'"),
    ("verify good.py --tolerance -1", "-1"),
    ("verify good.py --epochs 3", "--epochs"),
    ("verify good.py --nprok 2", "--nproc"),
    # A flag of the script stands after the dashes.
    (f"verify {EXAMPLES}/gan.py --points 777", "-- "),
]


@pytest.mark.parametrize(("command", "named"), REFUSED)
def test_what_cannot_be_is_refused_with_one_message_and_leaves_nothing(
    here, refused, monkeypatch, command, named
):
    before = tree(here)
    if "pip install" in named:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert named in refused(*command.split())
    assert tree(here) == before
