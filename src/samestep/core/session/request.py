"""From a recipe, a file of settings and the flags to one request: what to train, and how.

Precedence: recipe defaults < file < flags. A resumed run keeps the settings that it was begun with,
except those that may change or that `--allow-change` names.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import tomli_w

from samestep.base.errors import UserError, did_you_mean
from samestep.base.flags import HERE
from samestep.base.run.directory import is_run, no_run
from samestep.base.run.summary import first_start
from samestep.base.settings import Settings, as_table, flag_name, free_names, merge_layers
from samestep.core.plan import Plan
from samestep.core.recipe import Recipe, find_recipe
from samestep.core.recipe_checks import FROM_PYTHON, unread_options, with_script_words
from samestep.core.recipes import RECIPES
from samestep.core.session.declared import (
    SCRIPT_ARGS,
    check_words,
    options_table,
    read_config,
    typed,
    words_of,
)

if TYPE_CHECKING:
    from samestep.base.run.code_pieces import Pieces

_COLUMNS = 100
_SIZES = ("batch_size", "batch_tokens", "micro_batch_size", "accumulate")
# These decide which samples a step takes, so no flag allows another value.
_OF_THE_ORDER = frozenset(
    [
        *("seed", "drop_last", "batch_size", "batch_size_per_rank", "num_samples"),
        *("shuffle_buffer", "order", "group_by_length", "batch_tokens"),
    ]
)
_FIXED = _OF_THE_ORDER | {"engine", "virtual_ranks", "init_from"}

Change = tuple[Any, Any]
"""A value before, and the value now; None where it was not set."""


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
    script_args: tuple[str, ...] = ()
    """Arguments of a script that builds a Trainer."""
    pieces: "Pieces" = field(default_factory=dict)
    """What a recipe made in Python is, before any of its functions ran."""
    resume_from: str | None = None
    """The store that the run is fetched from first."""
    again: "Callable[[], Request] | None" = None
    """Makes the request anew, once the run is here."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A request before the flags: the recipe and the layers below them."""

    recipe: Recipe
    source: str
    layers: tuple[dict[str, object], ...]
    """Settings by the names of their fields, of the recipe and of files; the later ones win."""
    options_layer: dict[str, object]
    run: Path | None = None
    """The run that the settings are taken from, if the target was one."""
    folder: Path = field(default_factory=Path.cwd)
    script_args: tuple[str, ...] = ()

    def settings(self) -> Settings:
        """Return the settings as they are without flags."""
        return Settings(**merge_layers(*self.layers))  # type: ignore[arg-type]

    def given(self, name: str, flags: Mapping[str, object]) -> Any:
        """Return a setting as flags or a layer have it, if no other setting replaces it."""
        return next((layer[name] for layer in (flags, *self.layers[::-1]) if name in layer), None)

    def options(self) -> Any:
        """Return the recipe's options as they are without flags, or None if it has none."""
        return self.recipe.make_options(**self.options_layer)


def draft(
    target: str | None,
    config: Path | None = None,
    recipe: Recipe | None = None,
    script_args: Sequence[str] = (),
) -> Draft:
    """Return the draft for a recipe's name, a recipe file, or the directory of a run.

    `config` is a TOML or YAML file above the recipe's own settings. `recipe` is an object in place
    of a target, or of the recipe that the run names. `script_args` are those of a script that
    builds a Trainer; a run has them.
    """
    tables = [(config, read_config(config))] if config else []
    if target is None:
        assert recipe is not None
        return _layered(FROM_PYTHON + recipe.name, recipe, tables)
    folder, source, run = Path.cwd(), target, _run_of(target)
    if run is not None:
        file = run / "settings.toml"
        of_run = read_config(file)
        if "recipe" not in of_run and not any("recipe" in table for _, table in tables):
            raise UserError(
                f"{file} names no recipe: {run} comes from a loop of your own, and only its script "
                f'can continue or evaluate it. For the weights: samestep.load("{run}", model=…).'
            )
        source = str(of_run.get("recipe") or tables[0][1]["recipe"])
        tables.insert(0, (file, of_run))
    for path, table in tables[run is not None :]:
        if (named := str(table.get("recipe", source))) != source:
            raise UserError(
                f"{path} is for recipe {named!r}, not for {source!r}. Name that recipe, or remove "
                "the key `recipe` from the file."
            )
    script_args = words_of(script_args, [table for _, table in tables], run)
    if recipe is not None:  # another file, as the run's own copy, may have it under another name
        recipe = replace(recipe, name=_name_of(source))
    else:
        with with_script_words(script_args):
            recipe = find_recipe(source) if run is None else _recipe_of_run(run, source)
    if source.endswith(".py"):
        source = str((folder / source).resolve())
    if run is not None and folder != Path.cwd():
        run = folder / run
    layered = _layered(source, recipe, tables)
    return replace(layered, run=run, folder=folder, script_args=tuple(script_args))


def _run_of(target: str) -> Path | None:
    """Return the directory of a run; None for a recipe."""
    if target in RECIPES or not Path(target).is_dir():  # a folder of data may be called mnist
        return None
    if is_run(Path(target)):
        return Path(target)
    raise no_run(Path(target))


def _layered(source: str, recipe: Recipe, tables: list[tuple[Path, dict[str, Any]]]) -> Draft:
    own, _ = typed(dict(recipe.settings), recipe, source)
    layers = [own]
    options = dict[str, object]()
    for path, table in tables:
        about = ("recipe", SCRIPT_ARGS)
        values = {name: value for name, value in table.items() if name not in about}
        ours, theirs = typed(values, recipe, path)
        layers.append(ours)
        options.update(theirs)
    return Draft(recipe=recipe, source=source, layers=tuple(layers), options_layer=options)


def _name_of(source: str) -> str:
    return Path(source).stem if source.endswith(".py") else source.removeprefix(FROM_PYTHON)


def _recipe_of_run(run: Path, source: str) -> Recipe:
    """Return a run's recipe: its file where it was, or the copy that the run keeps."""
    if source.startswith(FROM_PYTHON):
        raise UserError(
            f"The recipe of {run} was built in Python, and no file has it. Pass it again: "
            f"samestep.load({str(run)!r}, recipe=…), likewise to train, evaluate and predict; or "
            "write it to a file, and pass that as recipe=."
        )
    from samestep.core.session.recipe_changes import copy_of_run  # noqa: PLC0415 - of runs only

    gone = source.endswith(".py") and not Path(source).is_file()
    return (copy_of_run(run, source) if gone else None) or find_recipe(source)


def recipe_copy_of(target: str | None, run_dir: object) -> Recipe | None:
    """Return a run's own copy of its recipe: of the run `target`, or else of `run_dir`."""
    from samestep.core.session.recipe_changes import copy_of_run  # noqa: PLC0415 - of runs only

    for run in (target, run_dir):
        if run and run not in RECIPES and is_run(Path(str(run))):
            words = read_config(Path(str(run)) / "settings.toml").get(SCRIPT_ARGS, ())
            with with_script_words(words):
                return copy_of_run(Path(str(run)), recipe_named_by(Path(str(run))))
    return None


def recipe_named_by(run: Path) -> str:
    """Return the source of the recipe that a run names."""
    return str(read_config(run / "settings.toml").get("recipe"))


def finish(
    start: Draft,
    flags: Mapping[str, object],
    options: Any,
    *,
    named: set[str],
    resume: bool | str | None,
    allow_change: str | None = None,
) -> Request:
    """Return the request: `flags` are the settings that were given, `options` has those applied.

    `named` names both. `resume` may be the address of a store that has the run.
    """
    store = resume if isinstance(resume, str) and resume != HERE else None
    if store is not None and start.given("run_dir", flags) is None:
        flags = {**flags, "run_dir": str(Path("runs", PurePath(store).name))}
    mirror = start.given("mirror", flags)
    if store is not None or mirror:
        from samestep.base.run.store import address_of, check_address  # noqa: PLC0415

        for address in filter(None, (store, address_of(mirror))):
            check_address(address)
    again = partial(_finished, start, flags, options, named, bool(resume), allow_change)
    return replace(again(), resume_from=store, again=again)


def _finished(
    start: Draft,
    given_settings: Mapping[str, object],
    options: Any,
    named: set[str],
    resume: bool,
    allow_change: str | None,
) -> Request:
    if allow_change is not None and not resume:
        raise UserError(f"--allow-change {allow_change} has no effect without --resume.")
    allowed = _names_allowed(allow_change or "", start.recipe)
    flags = dict(given_settings)
    run_dir = str(start.given("run_dir", flags) or "")
    if run_dir and start.folder != Path.cwd():
        run_dir = str(start.folder / run_dir)
    run = start if resume and start.run is not None else None
    if resume and start.run is None and run_dir and is_run(Path(run_dir)):
        if (name := _name_of(recipe_named_by(Path(run_dir)))) != start.recipe.name:
            raise UserError(
                f"{run_dir} holds a run of recipe {name}, not of {start.recipe.name}. Choose "
                "another --run-dir."
            )
        run = draft(run_dir, None, start.recipe)  # a repeated command
        check_words(run.script_args, start.script_args, run_dir)
    if run is not None and (size := flags.pop("batch_size_per_rank", None)) is not None:
        _check_per_rank(run, size)
    merged = merge_layers(*start.layers, flags)
    merged |= {"run_dir": run_dir} if run_dir else {}
    if run is not None and run is not start:
        if options is not None:  # those that the repeated command does not give are the run's
            own, before = {*named, *start.options_layer}, run.options()
            of_run = {f.name: getattr(before, f.name) for f in fields(before) if f.name not in own}
            options = replace(options, **of_run)
        merged = _with_sizes_of(run, merge_layers(*run.layers, merged), flags)
    elif start.run is not None:
        merged["run_dir"] = str(start.run) if resume else flags.get("run_dir")
        merged |= {} if resume else {"mirror": flags.get("mirror")}  # that is of the other run
    init = merged.get("init_from")  # by its whole path, as a resume compares it
    merged |= {"init_from": str(start.folder / str(init))} if init else {}
    resolved = Settings(**merged)  # type: ignore[arg-type]
    recipe_changes: tuple[str, ...] = ()
    if run is not None:
        from samestep.core.session.recipe_changes import accepted_changes  # noqa: PLC0415

        _check_same(run, resolved, options, named, allowed)
        recipe_changes = accepted_changes(run.run, run.source, start.recipe, allowed)
    _check_trackers(resolved)
    _refuse_unread(start, options, named)
    return Request(
        recipe=start.recipe.with_options(options),
        source=start.source,
        options=options,
        settings=resolved,
        resume=resume,
        allow_change=allowed,
        settings_of=None if resume else start.run,
        recipe_changes=recipe_changes,
        script_args=start.script_args,
        pieces=_recipe_pieces(start),
        folder=start.folder,
    )


def _check_trackers(settings: Settings) -> None:
    if any(isinstance(v, str) for n, v in vars(settings).items() if n.startswith("track")):
        from samestep.base.tracker_choice import check_choice  # noqa: PLC0415

        check_choice(settings)


def _recipe_pieces(start: Draft) -> "Pieces":
    if not start.source.startswith(FROM_PYTHON):
        return {}
    from samestep.core.session.recipe_pieces import pieces_of  # noqa: PLC0415

    return pieces_of(start.recipe)


def _with_sizes_of(
    run: Draft, merged: Mapping[str, object], flags: Mapping[str, object]
) -> dict[str, object]:
    """Return the settings of a repeated command with the batch sizes of the run that it resumes."""
    of_run = merge_layers(*run.layers)
    asked = _SIZES[:2] if of_run.get("virtual_ranks") is not None else _SIZES
    sizes = {name: of_run[name] for name in _SIZES if name in of_run}
    sizes = merge_layers(sizes, {name: flags[name] for name in asked if name in flags})
    others = {*_SIZES, "batch_size_per_rank"}
    return {k: v for k, v in merged.items() if k not in others} | sizes


def _refuse_unread(start: Draft, options: Any, given_names: set[str]) -> None:
    """Refuse an option that is given and that no function of the recipe reads."""
    if options is None:
        return
    named = given_names if start.run is not None else {*given_names, *start.options_layer}
    unread, without = unread_options(start.recipe)
    for name in sorted(named.intersection(unread)):
        raise UserError(
            f"--{flag_name(name)} {getattr(options, name)}: no function of the recipe reads this "
            f"option. A function gets the options through a parameter named `options`; without "
            f"it are: {', '.join(without)}."
        )


# --- what may change when a run is resumed


def _names_of(recipe: Recipe) -> set[str]:
    own = fields(recipe.options) if recipe.options is not None else ()
    return {f.name for f in (*fields(Settings), *own)}


def _names_allowed(text: str, recipe: Recipe) -> tuple[str, ...]:
    """Return the settings and options that `--allow-change` names."""
    words = [word.strip().removeprefix("--").replace("-", "_") for word in text.split(",")]
    names, existing = tuple(filter(None, words)), {*_names_of(recipe), "recipe"}
    for name in names:
        if name in _FIXED & existing:
            raise UserError(
                f"--allow-change {name}: it cannot change within a run. Start a new run from the "
                "settings of this one: name its directory, without --resume."
            )
        if name not in existing:
            raise UserError(
                f"--allow-change {text}: there is no setting {name!r}. "
                f"{did_you_mean(name, existing)}Name settings or options, with commas between "
                "them: --allow-change lr,weight_decay."
            )
    return names


def _check_same(
    run: Draft, settings: Settings, options: Any, named: set[str], allowed: Iterable[str]
) -> None:
    """Refuse the first setting or option that differs from the run's and may not."""
    before, after = as_table(run.settings()), as_table(settings)
    if options is not None:
        before, after = {**before, **vars(run.options())}, {**after, **vars(options)}
    free = free_names(Settings, run.recipe.options, virtual_ranks=before.get("virtual_ranks"))
    changes = _differing(before, after, (before.keys() | after.keys()) - free - {*allowed})
    for name in sorted(changes, key=lambda name: (name not in named, name)):
        raise _refused_change(name, changes[name], is_given=name in named)


def _check_per_rank(run: Draft, now: object) -> None:
    assert run.run is not None
    begun = first_start(run.run)
    total, ranks = begun.get("global_batch_size", 0), begun.get("world_size", 1)
    before = begun.get("batch_size_per_rank") or (total // ranks if total % ranks == 0 else None)
    if before != now:
        raise _refused_change("batch_size_per_rank", (before, now), is_given=True)


def _refused_change(name: str, change: Change, *, is_given: bool) -> UserError:
    """Return the error for a changed value; `is_given` by the call rather than by a file."""
    before, now = map(_shown, change)
    value = "" if change[1] is True else f" {now}"
    changed = f"--{flag_name(name)}{value}" if is_given else f"{name} = {now} in the settings"
    begun = f"{changed}: the run was started with {before}"
    if name in _FIXED:
        return UserError(
            f"{begun}. It cannot change within a run: omit it, or start a new run without --resume."
        )
    return UserError(
        f"{begun}. Resuming with this value would be a different training: leave it out, start a "
        f"new run without --resume, or add --allow-change {name}."
    )


def changes_since(made_with: str, now: str, request: Request, where: str) -> list[str]:
    """Return the changes from a checkpoint's TOML that --allow-change allows; refuse others."""
    recipe = request.recipe
    options = {} if recipe.options is None else asdict(recipe.options())
    defaults = as_table(Settings()) | {k: v for k, v in options.items() if v is not None}
    defaults = {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items()}

    def flat(table: dict[str, Any]) -> dict[str, Any]:  # a setting may be newer than the file
        return {**defaults, **table, **table.get("options", {})}

    before, after = flat(tomllib.loads(made_with)), flat(tomllib.loads(now))
    free = free_names(Settings, recipe.options, virtual_ranks=before.get("virtual_ranks"))
    changes = _differing(before, after, sorted(_names_of(recipe) - free - _OF_THE_ORDER))
    if others := changes.keys() - request.allow_change:
        was, would = (
            ", ".join(f"{k} = {_shown(pair[n])}" for k, pair in changes.items() if k in others)
            for n in (0, 1)
        )
        insist = f", or add --allow-change {','.join(changes)} to continue with the new one"
        raise UserError(
            f"{where} was made with {was}; the run would continue with {would}, from its "
            "settings.toml or the command. Write the old value back"
            f"{'' if _FIXED & others else insist}."
        )
    return [f"{k} from {_shown(old)} to {_shown(new)}" for k, (old, new) in changes.items()]


def _differing(
    before: Mapping[str, Any], after: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Change]:
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    # Two NaNs differ, and are written alike.
    return {n: (a, b) for n, (a, b) in pairs.items() if a != b and repr(a) != repr(b)}


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)


# --- what a run keeps


def to_toml(request: Request, plan: Plan) -> str:
    """Return the settings, with the batch sizes of the plan, as the text of settings.toml."""
    table = as_table(request.settings)
    table.pop("run_dir", None)  # the file lies in it
    if plan.by_tokens is None:
        for name in ("batch_size_per_rank", "accumulate"):
            table.pop(name, None)
        table["batch_size"] = plan.global_batch_size
        if plan.micro_batch_size < plan.global_batch_size:  # fewer ranks need no more memory
            table.setdefault("micro_batch_size", plan.micro_batch_size)
    document: dict[str, Any] = {"recipe": request.source, **table}
    if request.script_args:
        document[SCRIPT_ARGS] = [*request.script_args]
    if request.options is not None:
        document["options"] = options_table(request.options)
    # As many items of a list on a line as fit: lists may have thousands.
    lines: list[str] = []
    for line in tomli_w.dumps(document).split("\n"):
        is_item = line.startswith("    ") and bool(lines) and lines[-1].startswith("    ")
        if is_item and len(lines[-1]) + len(line) - 3 <= _COLUMNS:
            lines[-1] += line[3:]
        else:
            lines.append(line)
    return "\n".join(lines)
