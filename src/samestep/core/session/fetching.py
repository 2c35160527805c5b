"""`--resume s3://…`: a run that was copied to a store is fetched, then continued like any other."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.run.directory import is_run
from samestep.base.run.files import cannot_write, write_text
from samestep.base.run.index import Entry, Index, Retention, index_text, read_index, remove, verify
from samestep.base.run.store import FILES, INDEX, Store, check_installed_for
from samestep.core.session.request import Request
from samestep.core.session.training_run import choose_path
from samestep.launch.ranks.world import World


def fetched(request: Request, world: World) -> Request:
    """Return the request anew once its run is here: rank 0 fetches it if it is not.

    All ranks of `world` call it. The run's settings count then, as with any resume.
    """
    address, again = request.resume_from, request.again
    if address is None or again is None:
        return request

    def bring() -> None:
        check_installed_for(address)
        try:
            _fetch(Store(address), choose_path(request))
        except UserError:
            raise
        except Exception as error:  # whatever a store's client raises
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{address} cannot be fetched: {why}") from error

    world.on_main(bring)
    return world.on_every(again)


def _fetch(store: Store, path: Path) -> None:
    """Bring a run into a directory, which is a run only once all is there.

    Without a whole checkpoint nothing is fetched. A run that is here already is as far, or refused.
    """
    index, folder = store.index(), path / "checkpoints"
    if is_run(path):
        here, there = read_index(folder).last, index.last
        if there is not None and (here is None or here.step < there.step):
            raise UserError(
                f"{store.address} is at step {there.step:,}, and {path} only at step "
                f"{0 if here is None else here.step:,}. Fetch it into a new --run-dir, or continue "
                "the local run: --resume without the address."
            )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error, instead="choose another --run-dir") from error
    kept = tomllib.loads((store.read(FILES[0]) or b"").decode())
    rules = Retention(
        top_k=kept.get("keep_top_k"), newest=kept.get("keep_newest"), hours=kept.get("keep_hours")
    )
    fetched = _fetch_kept(store, folder, index, rules)
    if not fetched:
        _say(f"{store.address} has no checkpoint, so the training starts over.")
        return
    write_text(path / INDEX, index_text(replace(index, checkpoints=fetched, gone=())))
    names = sorted(store.files(), key=lambda name: name == FILES[0])
    for name in names:  # settings.toml, which makes it a run, is the last
        _get(store, name, path / name)
    if not is_run(path):
        raise UserError(f"{store.address} has no {FILES[0]}: it is not a complete copy of a run.")
    _say(f"fetched {path} from {store.address}, step {fetched[-1].step:,}.")


def _fetch_kept(store: Store, folder: Path, index: Index, rules: Retention) -> tuple[Entry, ...]:
    """Fetch the checkpoints that the run keeps; if it keeps all, only the newest and the best.

    One without its hash is left out, and then the next one counts.
    """
    intact: dict[str, Entry] = {}
    rules = Retention(newest=1) if rules.keeps_all else rules
    while missing := [e for e in index.prune(rules).checkpoints if e.path not in intact]:
        entry = missing[-1]
        try:
            for name in (entry.path, *entry.files):
                _get(store, f"checkpoints/{name}", folder / name)
            verify(folder, entry)
        except (UserError, FileNotFoundError) as error:
            why = error if isinstance(error, UserError) else f"{store.address} lacks {entry.path}."
            _say(f"passed over: {why}")
            remove(folder / entry.path)
            others = tuple(other for other in index.checkpoints if other != entry)
            index = replace(index, checkpoints=others)
        else:
            intact[entry.path] = entry
    return tuple(sorted(intact.values(), key=lambda entry: entry.step))


def _get(store: Store, name: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.tmp")
    store.get(name, part)
    part.replace(file)


def _say(text: str) -> None:
    sys.stderr.write(f"samestep: {text}\n")
