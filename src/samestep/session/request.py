"""From a recipe, a TOML file and the flags to one request: what to train, and how.

Precedence: recipe defaults < TOML < flags.
"""

import tomllib
import typing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from samestep.errors import UserError, did_you_mean
from samestep.recipe import Recipe, find_recipe
from samestep.recipe_source import unread_options
from samestep.recipes import RECIPES
from samestep.run.directory import is_run, no_run
from samestep.run.index import best_file
from samestep.run.records import first_start
from samestep.session.changes import (
    Change,
    differing,
    parse_names,
    refused_change,
    with_sizes_of_run,
)
from samestep.session.recipe_changes import FROM_PYTHON, accepted_changes, copy_of_run
from samestep.session.recipe_pieces import Pieces, pieces_of
from samestep.settings import (
    Settings,
    as_table,
    flag_name,
    free_names,
    merge_layers,
    own_names,
    settings_of_run,
)
from samestep.tracking.choice import check_choice

_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for: a recipe with its options, the settings, and whether to resume."""

    recipe: Recipe
    source: str
    """The recipe's name, the absolute path of its file, or `FROM_PYTHON` and its name."""
    options: Any
    """An instance of the recipe's options, or None if it has none."""
    settings: Settings
    resume: bool = False
    allow_change: tuple[str, ...] = ()
    """Settings and options that may differ from those of the checkpoint."""
    settings_of: Path | None = None
    """The run whose settings a new run starts with."""
    folder: Path = field(default_factory=Path.cwd)
    """The working directory before the recipe's file, which may change it, was read."""
    recipe_changes: tuple[str, ...] = ()
    """What differs in the recipe of a resumed run, allowed by --allow-change."""
    pieces: Pieces = field(default_factory=dict)
    """What a recipe made in Python is, before any of its functions ran."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A request before the flags: the recipe and the layers below them."""

    recipe: Recipe
    source: str
    settings_layer: dict[str, object]
    options_layer: dict[str, object]
    run: Path | None = None
    """The run that the settings are taken from, if the target was one."""
    earlier: bool = False
    """Whether that run is of the time when `batch_size` counted per rank."""
    folder: Path = field(default_factory=Path.cwd)

    def settings(self) -> Settings:
        """Return the settings as they are without flags."""
        return Settings(**self.settings_layer)  # type: ignore[arg-type]

    def options(self) -> Any:
        """Return the recipe's options as they are without flags, or None if it has none."""
        return self.recipe.make_options(**self.options_layer)


def draft(target: str | None, config: Path | None = None, recipe: Recipe | None = None) -> Draft:
    """Return the draft for a recipe's name, a recipe file, or the directory of a run.

    `config` is a TOML file above the recipe's own settings. `recipe` is an object in place of a
    target, or of the recipe that the run names.
    """
    if target is None:
        assert recipe is not None
        target = FROM_PYTHON + recipe.name
        return _layered(target, recipe, None, [(config, read_toml(config))] if config else [])
    named_recipe = target in RECIPES  # a folder of data may well be called mnist
    run = Path(target) if not named_recipe and is_run(Path(target)) else None
    if run is None and not named_recipe and Path(target).is_dir():
        raise no_run(Path(target))
    tables = [
        (path, read_toml(path)) for path in (run / "settings.toml" if run else None, config) if path
    ]
    earlier = bool(run) and "global_batch_size" in tables[0][1]
    tables[:1] = [(p, settings_of_run(t) if run else t) for p, t in tables[:1]]
    named = [str(table.pop("recipe")) for _, table in tables if "recipe" in table]
    if run and not named:
        raise UserError(
            f"{run / 'settings.toml'} names no recipe: {run} comes from a loop of your own, "
            "and only its script can go on with it or evaluate it. The weights: torch.load("
            f'"{best_file(run / "checkpoints")}")["state"].'
        )
    source, folder = named[0] if run else target, Path.cwd()
    for path, _ in tables[1 if run else 0 :]:
        if named and named[-1] != source:
            raise UserError(
                f"{path} is for recipe {named[-1]!r}, and {source!r} was asked for. Name that "
                "recipe, or take the key `recipe` out of the file."
            )
    if recipe is None:
        recipe = _recipe_of_run(run, source) if run else find_recipe(source)
    else:  # another file, as the run's own copy, may have it under another name
        recipe = replace(recipe, name=_name_of(source))
    if source.endswith(".py"):
        source = str((folder / source).resolve())
    if run is not None and folder != Path.cwd():
        run = folder / run
    return replace(_layered(source, recipe, run, tables), earlier=earlier, folder=folder)


def _layered(
    source: str, recipe: Recipe, run: Path | None, tables: list[tuple[Path, dict[str, Any]]]
) -> Draft:
    """Return the draft of a recipe with the tables above its own settings."""
    own, _ = typed(dict(recipe.settings), recipe, source)
    layers: list[dict[str, object]] = [own]
    options: dict[str, object] = {}
    for path, table in tables:
        table.pop("recipe", None)
        ours, theirs = typed(table, recipe, path)
        layers.append(ours)
        options.update(theirs)
    merged = merge_layers(*layers)
    return Draft(
        recipe=recipe, source=source, settings_layer=merged, options_layer=options, run=run
    )


def _name_of(source: str) -> str:
    """Return the name of the recipe that a run names."""
    return Path(source).stem if source.endswith(".py") else source.removeprefix(FROM_PYTHON)


def _recipe_of_run(run: Path, source: str) -> Recipe:
    """Return a run's recipe: its file where it was, or the copy that the run keeps."""
    if source.startswith(FROM_PYTHON):
        raise UserError(
            f"The recipe of {run} was made in Python, and no file has it. Give it there, too: "
            f"samestep.load({str(run)!r}, recipe=…), and so for train, evaluate and predict; or "
            "write it into a file, and give recipe= that file."
        )
    gone = source.endswith(".py") and not Path(source).is_file()
    return (copy_of_run(run, source) if gone else None) or find_recipe(source)


def own_recipe(target: str | None, run_dir: object) -> Recipe | None:
    """Return a run's own copy of its recipe: of the run `target`, or else of `run_dir`."""
    for run in (target, run_dir):
        if run and run not in RECIPES and is_run(Path(str(run))):
            source = str(read_toml(Path(str(run)) / "settings.toml").get("recipe"))
            return copy_of_run(Path(str(run)), source)
    return None


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file's table, with its keys as field names."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no valid TOML: {error}.") from error
    options = table.pop("options", {})
    if not isinstance(options, dict):
        raise UserError(f"{path}: [options] must be a table of the recipe's options.")
    return {key.replace("-", "_"): value for key, value in {**table, **options}.items()}


def typed(
    table: dict[str, Any], recipe: Recipe, where: Path | str
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the settings and the recipe's options of a table, each of its declared type."""
    types = _field_types(Settings)
    option_types = _field_types(recipe.options) if recipe.options else {}
    ours: dict[str, object] = {}
    theirs: dict[str, object] = {}
    for key, value in own_names(table, where).items():
        if key not in types and key not in option_types:
            own = f" The options of {recipe.name}: {', '.join(option_types)}."
            raise UserError(
                f"{where}: unknown setting {key!r}. {did_you_mean(key, [*types, *option_types])}"
                f"The settings: {', '.join(sorted(types))}.{own if option_types else ''}"
            )
        home, kind = (ours, types[key]) if key in types else (theirs, option_types[key])
        if kind in (str, str | None) and isinstance(value, list | tuple):
            value = ",".join(map(str, value))  # noqa: PLW2901 - as the flag has several
        try:
            home[key] = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            choices = ", ".join(map(repr, _choices(kind)))
            why = f"it must be one of {choices}" if choices else f"{error}".rstrip(".")
            raise UserError(f"{where}: {key} = {value!r}: {why}.") from error
    return ours, theirs


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal` type, or of `Literal | None`."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    return _choices(parts[0]) if len(parts) == 1 and type(None) in typing.get_args(kind) else ()


def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def finish(
    start: Draft,
    settings: Settings,
    options: Any,
    *,
    given: set[str],
    resume: bool,
    allow_change: str | None = None,
) -> Request:
    """Return the request; `settings` and `options` have the flags applied, named in `given`."""
    if allow_change is not None and not resume:
        raise UserError(f"--allow-change {allow_change} has no effect without --resume.")
    allowed = parse_names(allow_change, start.recipe)
    own = {one.name for one in fields(Settings)}
    flags = {name: getattr(settings, name) for name in given if name in own}
    run_dir = str(merge_layers(start.settings_layer, flags).get("run_dir") or "")
    if run_dir and start.folder != Path.cwd():
        run_dir = str(start.folder / run_dir)
    run = start if resume and start.run is not None else None
    if resume and start.run is None and run_dir and is_run(Path(run_dir)):
        run = _repeated(start, run_dir)
    if run is not None and flags.get("batch_size_per_rank") is not None:
        _check_per_rank(run, flags.pop("batch_size_per_rank"))
    merged = merge_layers(start.settings_layer, flags)
    merged |= {"run_dir": run_dir} if run_dir else {}
    if run is not None and run is not start:
        if options is not None:  # those that the repeated command does not give are the run's
            own = {*given, *start.options_layer}
            before = run.options()
            kept = {f.name: getattr(before, f.name) for f in fields(before) if f.name not in own}
            options = replace(options, **kept)
        merged = merge_layers(run.settings_layer, merged)
        merged = with_sizes_of_run(merged, run.settings_layer, flags, earlier=run.earlier)
    elif start.run is not None:
        merged["run_dir"] = str(start.run) if resume else flags.get("run_dir")
    if run is not None:
        changes = _changes(run, merged, options)
        virtual = run.settings_layer.get("virtual_ranks")
        free = free_names(Settings, run.recipe.options, virtual_ranks=virtual)
        for name in sorted(changes.keys() - free - {*allowed}, key=lambda n: (n not in given, n)):
            raise refused_change(name, changes[name], is_given=name in given)
    resolved = Settings(**merged)  # type: ignore[arg-type]
    check_choice(resolved)
    _refuse_unread(start, options, given)
    return Request(
        recipe=start.recipe.with_options(options),
        source=start.source,
        options=options,
        settings=resolved,
        resume=resume,
        allow_change=allowed,
        settings_of=None if resume else start.run,
        recipe_changes=accepted_changes(run.run, run.source, start.recipe, allowed) if run else (),
        pieces=pieces_of(start.recipe) if start.source.startswith(FROM_PYTHON) else {},
        folder=start.folder,
    )


def _check_per_rank(run: Draft, now: int) -> None:
    """Refuse a batch size per rank that is not the one that the run was begun with."""
    assert run.run is not None
    begun = first_start(run.run)
    total, ranks = begun.get("global_batch_size", 0), begun.get("world_size", 1)
    before = begun.get("batch_size_per_rank") or (total // ranks if total % ranks == 0 else None)
    if before != now:
        raise refused_change("batch_size_per_rank", (before, now), is_given=True)


def _refuse_unread(start: Draft, options: Any, given: set[str]) -> None:
    """Refuse an option that is given and that no function of the recipe reads."""
    if options is None:
        return
    named = given if start.run is not None else {*given, *start.options_layer}
    unread, without = unread_options(start.recipe)
    for name in sorted(named.intersection(unread)):
        raise UserError(
            f"--{flag_name(name)} {getattr(options, name)}: no function of the recipe reads this "
            f"option. A function gets the options through a parameter named `options`; without "
            f"it are: {', '.join(without)}."
        )


def _repeated(start: Draft, run_dir: str) -> Draft:
    """Return the draft of the run in the --run-dir of a repeated command."""
    source = str(read_toml(Path(run_dir) / "settings.toml").get("recipe"))
    if _name_of(source) != start.recipe.name:
        raise UserError(
            f"{run_dir} holds a run of recipe {_name_of(source)}, not of {start.recipe.name}. "
            "Choose another --run-dir."
        )
    return draft(run_dir, None, start.recipe)


def _changes(start: Draft, merged: dict[str, object], options: Any) -> dict[str, Change]:
    """Return the values that differ from those of the run, by their names."""
    before = as_table(start.settings())
    after = as_table(Settings(**merged))  # type: ignore[arg-type]
    old = start.options()
    if old is not None:
        before = {**before, **vars(old)}
        after = {**after, **vars(options)}
    return differing(before, after, before.keys() | after.keys())


def to_toml(request: Request, *, batch_size: int, micro_batch_size: int) -> str:
    """Return the settings, with the batch sizes that follow from them, as TOML.

    `samestep train RUN` starts from them.
    """
    table = as_table(request.settings)
    table.pop("run_dir", None)  # it is where the file lies
    table["batch_size"] = batch_size
    table = {k: v for k, v in table.items() if k not in ("batch_size_per_rank", "accumulate")}
    if micro_batch_size < batch_size:  # it fits: fewer ranks that go on need no more memory
        table.setdefault("micro_batch_size", micro_batch_size)
    document: dict[str, Any] = {"recipe": request.source, **table}
    if request.options is not None:
        own = asdict(request.options)
        document["options"] = {key: value for key, value in own.items() if value is not None}
    return _packed(tomli_w.dumps(document))


def _packed(toml: str) -> str:
    """Return TOML with as many items of a list on a line as fit: lists may have thousands."""
    lines: list[str] = []
    for line in toml.split("\n"):
        is_item = line.startswith("    ") and bool(lines) and lines[-1].startswith("    ")
        if is_item and len(lines[-1]) + len(line) - 3 <= _COLUMNS:
            lines[-1] += line[3:]
        else:
            lines.append(line)
    return "\n".join(lines)
