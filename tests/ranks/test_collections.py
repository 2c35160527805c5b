"""Garbage is put off while modules are imported, and never while someone's code trains."""

import gc

from tests.command_line import RECIPE, typed

USUAL = gc.get_threshold()
SAYS = (
    "import gc\nprint('state', gc.get_threshold(), gc.get_freeze_count() > 100_000, flush=True)\n"
)


def test_a_recipe_is_collected_as_usual_and_without_the_modules(tmp_path):
    says = "\n".join(f"    {line}" for line in SAYS.splitlines())
    text = RECIPE.replace("def model():\n", f"def model():\n{says}\n")
    (tmp_path / "recipe.py").write_text(text)
    done = typed("-m", "samestep", "train", "recipe.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = {line for line in done.stdout.splitlines() if line.startswith("state ")}
    assert told == {f"state {USUAL} True"}


def test_who_imports_samestep_keeps_a_collector_of_their_own(tmp_path):
    code = (
        "import gc; gc.set_threshold(70, 7, 7)\n"
        "import samestep; samestep.dist.setup_distributed(); samestep.dist.cleanup()\n"
        "assert (gc.get_threshold(), gc.get_freeze_count()) == ((70, 7, 7), 0)"
    )
    done = typed("-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
