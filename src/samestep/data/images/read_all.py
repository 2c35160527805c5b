"""Read every image once before training, so that a broken one is met now and not at epoch 7.

The ranks share the work, each in as many threads as it has cores: Pillow decodes without Python's
lock. What was found is remembered until a file changes, in the user's cache folder.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from samestep.data.images.decode import UnreadableImageError, decode
from samestep.data.images.file_list import FileList
from samestep.errors import UserError
from samestep.machine import usable_cores
from samestep.ranks.world import World
from samestep.run.files import read_object, write_text
from samestep.screen.counting import counting

_FILES_PER_TASK = 32
_FILES_PER_DIGEST = 4096

Broken = dict[int, str]
"""Place of a file → why it cannot be read."""


def find_broken(files: FileList, side: int, world: World) -> Broken:
    """Return the files that cannot be decoded: the same on every rank, which all call it."""
    stamp = _stamp(files, side, world)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(os.path.realpath(files.root).encode()).hexdigest()[:16]
    memory = home / "samestep" / "images" / f"{name}.json"
    known = world.on_main(lambda: read_object(memory))
    if known.get("stamp") == stamp:
        return {int(place): str(why) for place, why in known.get("broken", {}).items()}
    mine = range(world.rank, len(files), world.world_size)
    broken = _decode_all(files, mine, side, world, lambda _place, _image: None)
    world.on_main(lambda: _remember(memory, stamp, broken))
    return broken


def decode_into(files: FileList, images: Tensor, world: World) -> Broken:
    """Fill the memory of each node with its images; return what any rank could not decode.

    Every rank calls it and fills a part of its node's images (files, 3, side, side) uint8.
    """
    mine = range(world.local_rank, len(files), world.local_world_size)
    return _decode_all(files, mine, images.shape[-1], world, images.__setitem__)


def _decode_all(
    files: FileList, mine: range, side: int, world: World, keep: Callable[[int, Tensor], object]
) -> Broken:
    """Decode this rank's files in threads; return those of all ranks that cannot be decoded."""
    cores = usable_cores()
    neighbours = world.gather((world.node, cores)).count((world.node, cores))
    num_threads = max(1, len(cores) // neighbours)
    with counting("decoding images", len(mine), shown=world.is_main) as count:
        broken = decode_in_threads(
            files, mine, keep, lambda path: decode(path, side), num_threads, count
        )
    # The gather is also what lets nobody read the images before all have written theirs.
    return _merge(world.gather(broken))


def decode_in_threads(
    files: FileList,
    places: range,
    keep: Callable[[int, Tensor], object],
    decode_one: Callable[[str], Tensor],
    num_threads: int,
    count: Callable[[int], object] = lambda _: None,
) -> Broken:
    """Decode some files and keep each by its place; return those that cannot be decoded.

    `count` is called with each number of files that are done.
    """

    def work(some: Sequence[int]) -> Broken:
        broken = {}
        for place in some:
            try:
                keep(place, decode_one(files.path(place)))
            except UnreadableImageError as error:
                broken[place] = str(error)
        count(len(some))
        return broken

    tasks = [places[k : k + _FILES_PER_TASK] for k in range(0, len(places), _FILES_PER_TASK)]
    with ThreadPoolExecutor(num_threads) as pool:
        return _merge(pool.map(work, tasks))


def _merge(parts: Iterable[Broken]) -> Broken:
    """Put together what several have found, in the order of the files."""
    return dict(sorted(found for part in parts for found in part.items()))


def _stamp(files: FileList, side: int, world: World) -> str:
    """Return a digest of every file's path, size and time of change, the same on every rank."""
    starts = range(0, len(files), _FILES_PER_DIGEST)
    mine = {start: _digest(files, start) for start in starts[world.rank :: world.world_size]}
    digests = {start: digest for part in world.gather(mine) for start, digest in part.items()}
    whole = hashlib.sha256(f"1 {side} {len(files)}".encode())
    for start in starts:
        whole.update(digests[start])
    return whole.hexdigest()


def _digest(files: FileList, start: int) -> bytes:
    digest = hashlib.sha256()
    for place in range(start, min(start + _FILES_PER_DIGEST, len(files))):
        facts: tuple[object, ...] = ()
        with contextlib.suppress(OSError):  # the scan says what is wrong with it
            status = os.stat(files.path(place))  # noqa: PTH116 - once a file
            facts = (status.st_size, status.st_mtime_ns, status.st_mode)
        digest.update(repr((bytes(files.paths[place]), facts)).encode())
    return digest.digest()


def _remember(memory: Path, stamp: str, broken: Broken) -> None:
    # Where it cannot be written, the next run only reads the images once more.
    with contextlib.suppress(OSError, UserError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_text(memory, json.dumps({"stamp": stamp, "broken": broken}) + "\n")
