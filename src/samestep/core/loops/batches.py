"""The batches of a user's own loop: those of an epoch, from the exact step on, and validations."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any
from zlib import crc32

import torch

from samestep.base.errors import UserError
from samestep.core.data.keyed_random import mix, mix_next, seed_rank, seed_torch
from samestep.core.learner.agreement import check_same, random_numbers
from samestep.core.learner.carried import Carry
from samestep.core.learner.prepare import share_buffers
from samestep.core.loops.epochs import LoopEpochs
from samestep.core.loops.gradients import Passes, meet
from samestep.core.loops.kept_state import Means
from samestep.core.loops.loop_data import Drawn, OpenedData, OwnBatch
from samestep.core.loops.loop_session import LoopSession
from samestep.core.loops.place import AFTER_BATCHES, AFTER_EPOCHS, IN_BATCHES, LoopState
from samestep.core.recipe import Collate
from samestep.core.session.declared import checked_settings
from samestep.core.session.saver import say
from samestep.launch.ranks import watched

_VALIDATED = 3
"""The tag of the seeds for what is drawn in and after a validation; epochs have 1 and 2."""


class LoopBatches:
    """The data of a run, opened once, and its batches on this rank."""

    def __init__(self, opened: LoopSession, loop: LoopState, epochs: LoopEpochs) -> None:
        self._opened, self._loop, self._epochs = opened, loop, epochs
        self._data: dict[str, OpenedData] = {}
        self.log_into = opened.means
        """Means of the running epoch, or of a validation."""
        self.passes = Passes(opened.world)

    def close(self) -> None:
        """Close the data."""
        for reading in self._data.values():
            reading.source.close()

    def of_epoch(
        self,
        data: Any,
        global_batch_size: int,
        *,
        collate: Collate | None,
        num_workers: int,
        drop_last: bool,
        drawn: Drawn,
        carry: Carry | None,
    ) -> Iterator[OwnBatch]:
        """Yield this rank's part of the steps of the running epoch; see `OwnRun.batches`."""
        opened, loop, epochs = self._opened, self._loop, self._epochs
        seed, position, world = opened.options.seed, opened.position, opened.world
        num_workers = _checked(num_workers, "run.batches")
        order, weights = drawn
        parts = {"collate": collate, "weights": weights, "carry": carry}
        given: dict[str, Any] = {name: part is not None for name, part in parts.items()}
        given |= {"global_batch_size": global_batch_size, "drop_last": drop_last, "order": order}
        meet(world, "run.batches")
        check_same(given, world, "The arguments of run.batches")
        reading = self._open("train", data, collate, num_workers, drawn)
        if not opened.session.begun:
            for note in reading.notes():
                say(world, f"note: {note}")
        num_steps = reading.steps(global_batch_size, drop_last=drop_last)
        made_of = {
            "seed": seed,
            "num_samples": reading.source.num_samples,
            "global_batch_size": global_batch_size,
            "drop_last": drop_last,
            "data": reading.digest,
            **reading.source.order_record(),
        }
        epochs.begin(made_of, num_steps)
        if carry is not None:
            opened.carry(carry, global_batch_size)
        loop.place = IN_BATCHES
        opened.clock.resume(position)
        of_seed, of_rank = mix(seed), mix(seed, world.rank)
        first = position.step_in_epoch
        read = reading.epoch(position.epoch, first, global_batch_size, drop_last=drop_last)
        with closing(read):
            for batch in read:
                batch.step = position.step
                loop.backwards = 0
                opened.left_out.passed.clear()
                if opened.carried is not None:
                    opened.carried.begin(position.step_in_epoch, batch.global_size, batch.step)
                # The script draws other numbers on each rank.
                seed_torch(mix_next(of_rank, batch.step), world.device)
                seed_rank(mix_next(of_seed, batch.step), world.rank)
                torch.clear_autocast_cache()  # a context around the loop would keep older weights
                loop.batch = batch
                loop.used = False
                try:
                    yield batch
                except GeneratorExit:
                    if loop.used:  # break after the step, not before
                        epochs.count(batch.global_size)
                    loop.place = AFTER_BATCHES
                    raise
                finally:
                    loop.batch = None
                self.passes.end(batch.step)
                epochs.count(batch.global_size)
                epochs.after_step(is_last=position.step_in_epoch == num_steps)
        watched.turn_to(watched.EVALUATION)  # or whatever the script does after the batches
        epochs.sum_up()
        loop.place = AFTER_BATCHES

    def validation(
        self, data: Any, batch_size: int, split: str, collate: Collate | None, num_workers: int
    ) -> Iterator[OwnBatch]:
        """Yield this rank's share of all samples, each once; see `OwnRun.validation`."""
        if split not in ("validation", "test"):
            raise UserError(f"run.validation(split={split!r}): it must be 'validation' or 'test'.")
        num_workers = _checked(num_workers, "run.validation")
        if self._loop.place != IN_BATCHES:
            meet(self._opened.world, "run.validation")
        with self._aside(split) if self._loop.place == IN_BATCHES else nullcontext():
            yield from self._validate(data, batch_size, split, collate, num_workers)

    @contextmanager
    def _aside(self, split: str) -> Iterator[None]:
        """Leave the training, within one of its batches, as if there had been no validation."""
        opened, loop = self._opened, self._loop
        batch, used = loop.batch, loop.used
        self.passes.call("run.validation", opened.position.step)
        if opened.left_out.is_accumulating():
            raise UserError(
                "run.validation was called between run.backward and the optimizer's step, where "
                "the weights do not have all gradients of this batch yet.",
                remedy="Call it after optimizer.step(), or before run.backward.",
                on_all_ranks=True,
            )
        position, modules = opened.position, opened.modules().values()
        position.seconds = opened.clock.seconds()
        # A validation gives every rank the buffers of rank 0.
        buffers = [] if opened.world.is_main else [b for m in modules for b in m.buffers()]
        kept = [buffer.clone() for buffer in buffers]
        drawn = mix(opened.options.seed, 0, 0, position.epoch, _VALIDATED, crc32(split.encode()))
        try:
            with random_numbers(mix(drawn, position.step), opened.world.device):
                yield
        finally:
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
            torch.clear_autocast_cache()  # older PyTorch kept casts made without gradients
            loop.batch, loop.used = batch, used
            opened.clock.resume(position)

    def _validate(
        self, data: Any, batch_size: int, split: str, collate: Collate | None, num_workers: int
    ) -> Iterator[OwnBatch]:
        opened, loop, started = self._opened, self._loop, time.perf_counter()
        before = loop.place
        reading = self._open(split, data, collate, num_workers)
        for module in opened.modules().values():
            share_buffers(module, opened.world)  # else each rank evaluates a model of its own
        means = self.log_into = Means(opened.world)
        loop.place = f"in the {split}"
        watched.turn_to(watched.EVALUATION)
        step, epoch = opened.position.step, opened.position.epoch
        if before == IN_BATCHES and loop.backwards:
            step += 1  # the weights have made it
        try:
            for batch in reading.once(batch_size, epoch):
                batch.step, loop.batch = step, batch
                watched.alive()
                torch.clear_autocast_cache()
                yield batch
        finally:
            loop.place = before
            loop.batch = None
            self.log_into = opened.means
            if before != IN_BATCHES:
                # Ranks have drawn unequally often where their shares are unequal.
                self._epochs.seed(_VALIDATED, crc32(f"{split} {before}".encode()))
        loop.means = means.read()
        opened.session.emit(
            {
                "event": "evaluation",
                "split": split,
                "epoch": epoch + (before != AFTER_EPOCHS),
                "step": step,
                **loop.means,
                "samples": reading.source.num_samples,
                "seconds": time.perf_counter() - started,
            }
        )

    def _open(
        self,
        split: str,
        data: Any,
        collate: Collate | None,
        workers: int,
        drawn: Drawn = ("shuffled", None),
    ) -> OpenedData:
        if (before := self._data.get(split)) is not None:
            if before.is_of(data, collate, workers, drawn):
                return before
            before.source.close()
            del before, self._data[split]  # its memory may be needed for the new one
        opened = self._opened
        reading = OpenedData(data, opened.world, opened.options.seed, collate, workers, drawn)
        self._data[split] = reading
        return reading


def _checked(num_workers: int, call: str) -> int:
    """Return the number of workers as the flag would be; refuse what no flag may be."""
    checked: int = checked_settings({"num_workers": num_workers}, call)["num_workers"]
    return checked
