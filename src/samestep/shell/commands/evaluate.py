"""`samestep evaluate`: a checkpoint of a run, on one device, whatever it was trained on."""

from types import SimpleNamespace

from samestep.base.errors import escape
from samestep.base.words import class_table, measured
from samestep.shell.api.run_functions import evaluate
from samestep.shell.commands.forms import print_json, rich_console, verb


@verb(
    "evaluate",
    "evaluate runs/ID --checkpoint best",
    "evaluate runs/ID --checkpoint checkpoint_epoch_3.pt --split validation --json",
    of=evaluate,
)
def main(args: SimpleNamespace, *, json: bool = False) -> int:
    """Evaluate a checkpoint of a run on one device.

    Args:
        args: what `samestep.evaluate` takes.
        json: Print one JSON object.
    """
    result = evaluate(**vars(args))
    if json:
        print_json(result)
        return 0
    console = rich_console()
    for note in result.pop("notes", []):
        console.print(f"[yellow]{'note':<12}[/]{escape(note)}", soft_wrap=True)
    table = class_table(result.pop("per_class", {}), result.pop("confusion", []))
    width = max(12, *(len(name) + 2 for name in result))
    for name, value in result.items():
        grouped = f"{value:,}" if isinstance(value, int) else str(value)
        shown = measured(value) if isinstance(value, float) else grouped
        console.print(f"[bold]{name:<{width}}[/]{escape(shown)}", soft_wrap=True)
    for line in table:
        console.print(f"{'':<{width}}{escape(line)}", soft_wrap=True)
    return 0
