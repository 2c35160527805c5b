import tomllib
from dataclasses import dataclass

from samestep.execution.request import Request, to_toml
from samestep.recipe import find_recipe
from samestep.settings import Settings


@dataclass(frozen=True)
class Long:
    numbers: tuple[float, ...] = tuple(number / 7 for number in range(2000))
    names: tuple[str, ...] = ("    a", "line\nbreak", "next\u2028line", "],", 'say "x = ["', "") * 9
    few: tuple[str, ...] = ("one", "two")
    none: tuple[str, ...] = ()


def test_long_lists_of_a_runs_settings_take_few_lines_and_are_read_as_they_were():
    options = Long()
    request = Request(
        recipe=find_recipe("spiral"), source="spiral", options=options, settings=Settings()
    )
    written = to_toml(request, batch_size=4, global_batch_size=8)
    assert tomllib.loads(written)["options"] == {n: list(v) for n, v in vars(options).items()}
    assert written.count("\n") < 600
    assert all(len(line) <= 100 for line in written.split("\n"))
