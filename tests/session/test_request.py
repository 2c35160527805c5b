import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep import Recipe, UserError
from samestep.base.settings import Settings
from samestep.core.plan import make_plan
from samestep.core.recipe import find_recipe
from samestep.core.recipe_checks import unread_options, with_options
from samestep.core.recipes import RECIPES
from samestep.core.session.request import Request, draft, to_toml, typed
from tests.api.recipes import made


@dataclass(frozen=True)
class Long:
    numbers: tuple[float, ...] = tuple(number / 7 for number in range(2000))
    names: tuple[str, ...] = ("    a", "line\nbreak", "next\u2028line", "],", 'say "x = ["', "") * 9
    few: tuple[str, ...] = ("one", "two")
    none: tuple[str, ...] = ()


def test_long_lists_of_a_runs_settings_take_few_lines_and_are_read_as_they_were():
    options = Long()
    settings = Settings(epochs=1, batch_size=8)
    request = Request(
        recipe=find_recipe("spiral"), source="spiral", options=options, settings=settings
    )
    written = to_toml(request, make_plan(settings, 100, 2))
    assert tomllib.loads(written)["options"] == {n: list(v) for n, v in vars(options).items()}
    assert written.count("\n") < 600
    assert all(len(line) <= 100 for line in written.split("\n"))


@dataclass(frozen=True)
class Chosen:
    size: Literal["small", "large"] | None = None
    amount: int | Literal["all"] = "all"
    colours: tuple[Literal["red", "blue"], ...] = ()
    place: Path | str = ""


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("size", "tiny", "one of 'small', 'large'"),
        ("amount", "many", "'many': Invalid"),
        ("colours", ["red", "green"], "'green' - at `$[1]`"),
        ("place", "here", "its declared type cannot be used. Type unions"),
    ],
)
def test_choices_are_named_where_there_is_nothing_else_to_choose(name, value, told):
    recipe = replace(find_recipe("spiral"), options=Chosen)
    with pytest.raises(UserError, match=re.escape(told)):
        typed({name: value}, recipe, "mine.toml")


def test_a_yaml_file_says_what_a_toml_file_says_with_the_words_of_yaml_1_2(tmp_path):
    yaml, toml = tmp_path / "mine.yaml", tmp_path / "mine.toml"
    yaml.write_text(
        "lr: 1e-3\ncompile: off\neval-every: [1epoch, 500steps]\nrun-dir: no\n"
        "options: {hidden_dims: [8, 4], noise: 1e-1}  # of the recipe\n"
    )
    toml.write_text(
        'lr = 1e-3\ncompile = "off"\neval-every = ["1epoch", "500steps"]\nrun-dir = "no"\n'
        "[options]\nhidden_dims = [8, 4]\nnoise = 1e-1\n"
    )
    both = [draft("spiral", file) for file in (yaml, toml)]
    assert both[0].settings() == both[1].settings()
    assert both[0].options() == both[1].options()
    yaml.write_text("# nothing\n")
    assert draft("spiral", yaml).settings() == draft("spiral").settings()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lr: [1", "mine.yml is not valid YAML: expected ',' or ']', but got '<stream end>' in"),
        ("lr: 1\nlr: 2", 'mine.yml is not valid YAML: found duplicate key "lr"'),
        ("lr: !!python/object:os.getcwd {}", "mine.yml is not valid YAML: could not determine"),
        ("lr: &again [*again]", "mine.yml is not valid YAML: "),
        pytest.param("[" * 9999, "mine.yml is not valid YAML: ", id="deep"),
        ("- lr", "mine.yml holds a list, not names with their values"),
        ("lr: fast", "mine.yml: lr = 'fast': it must be a number"),
        ("2024-01-01: 1", "mine.yml: unknown setting '2024"),
    ],
)
def test_a_yaml_file_that_says_something_else_is_one_message(text, told, tmp_path):
    file = tmp_path / "mine.yml"
    file.write_text(text)
    with pytest.raises(UserError, match=re.escape(told)):
        draft("spiral", file)


@dataclass(frozen=True)
class Options:
    smooth: float = 0.0
    rate: float = 0.1
    scale: float = 1.0
    unread: int = 0


def loss(outputs, targets, options):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=options.smooth)


def optimizer(options, model, _settings):
    return torch.optim.SGD(model.parameters(), lr=options.rate)


def big(outputs, _targets, *, options):
    return outputs[:, 0] * 0 + options.scale


def test_options_go_to_each_function_that_asks_and_one_that_nothing_reads_is_refused(here):
    functions = {"loss": loss, "optimizer": optimizer, "metrics": {"big": big}}
    recipe = made(options=Options, read=lambda path: torch.ones(4) * len(path.name), **functions)

    def trained(**options):
        run = samestep.train(recipe, quiet=True, epochs=1, **options)
        return run, run.per_epoch[-1]

    (run, plain), (_, smooth), (_, slow) = trained(), trained(smooth=0.3), trained(rate=0.001)
    assert len({plain["loss"], smooth["loss"], slow["loss"]}) == 3
    other, row = trained(scale=3.0)
    assert (row["validation_big"], row["big"]) == (3.0, 3.0)
    assert samestep.evaluate(other, split="validation")["big"] == 3.0
    assert "problem" not in samestep.predict(run, __file__)[0]
    with pytest.raises(UserError, match=r"unread 5.*model"):
        trained(unread=5)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"unread": 5.0}, "a whole number"),
        ({"smooth": nn.Linear(1, 1)}, "a Linear, which settings.toml cannot hold"),
        ({"smooth": "\udcff"}, "a str, which settings.toml cannot hold"),
        (None, "returned None"),
    ],
)
def test_what_complete_returns_is_refused_before_anything_is_written(here, found, told):
    complete = (lambda o: found) if found is None else lambda o: replace(o, **found)
    with pytest.raises(UserError, match=re.escape(told)):
        samestep.train(made(options=Options, complete=complete), quiet=True)
    assert not [*here.iterdir()]


@dataclass(frozen=True)
class Read:
    classes: int | None = None
    folder: Path = Path("a")
    missing: float = 0.0


def test_what_complete_returns_has_the_types_that_the_run_gives_back(here):
    seen = []
    recipe = made(
        options=Read,
        model=lambda options: seen.append(options) or nn.Linear(4, options.classes),
        read=lambda options, file: (options.folder, options.missing),
        complete=lambda options: replace(options, classes=np.int64(2), missing=np.float32("nan")),
    )
    run = samestep.train(recipe, quiet=True, epochs=1)
    samestep.evaluate(run)
    samestep.train(run, recipe=recipe, resume=True, epochs=2, quiet=True)
    assert {*map(repr, seen)} == {repr(Read(2, missing=float("nan")))}


def test_every_option_of_the_recipes_here_is_read_and_functions_keep_their_old_parameters():
    for name in RECIPES:
        recipe = find_recipe(name)
        assert recipe.options is None or unread_options(recipe)[0] == [], name
    for builder in (lambda o: o, lambda *o: o[0], lambda options=None: options):
        assert with_options("model", builder, 7)() == 7
    assert with_options("model", lambda width=3: width, 7)() == 3
    assert with_options("read", lambda _, path: (_, path), None)(1) == (None, 1)
    assert with_options("read", lambda path, options: (path, options), 7)(1) == (1, 7)

    class Built:
        def __init__(self, options):
            self.width = options.width

    class Inherits(Built):
        pass

    @dataclass(frozen=True)
    class Base:
        width: int = 1
        height: int = 1

        @property
        def area(self):
            return self.height

    @dataclass(frozen=True)
    class More(Base):
        nobody: int = 1

    plain = Recipe(model=dict, data=tuple, options=More)
    assert unread_options(plain)[0] == ["width", "nobody"], "also where no function has options"
    assert unread_options(replace(plain, model=Inherits))[0] == ["nobody"]

    @dataclass(frozen=True)
    class Derives(More):
        def __post_init__(self):
            object.__setattr__(self, "nobody", self.width)

    assert unread_options(replace(plain, options=Derives))[0] == [], "it hands itself on"

    @dataclass(frozen=True)
    class Table(More):
        def table(self):
            return self.__dict__

    assert unread_options(replace(plain, options=Table))[0] == []

    def whole(options):
        return options.__dict__["width"]

    assert unread_options(replace(plain, model=whole))[0] == [], "it may read any of them"
    again = with_options("loss", with_options("loss", lambda o, t, options: options, 1), 2)
    assert again(0, 0) == 2
