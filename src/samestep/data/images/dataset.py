"""Image files as a map-style data set, decoded one by one when they are asked for."""

from typing import Any

import torch
from torch.utils.data import Dataset

from samestep.data.images.decode import UnreadableImageError, decode
from samestep.data.images.folders import Files
from samestep.errors import UserError


class ImageFiles(Dataset[Any]):
    """Each sample is (image (3, side, side) uint8, label), decoded anew at each reading."""

    def __init__(self, files: Files, side: int) -> None:
        self._files, self._side = files, side

    def __len__(self) -> int:
        return len(self._files)

    def read_batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images (batch, 3, side, side) and labels (batch,): the loader asks for these."""
        images = torch.empty((len(indices), 3, self._side, self._side), dtype=torch.uint8)
        for place, index in enumerate(indices):
            images[place] = self[index][0]
        return images, torch.from_numpy(self._files.labels[indices])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self._files.path(index)
        try:
            return decode(path, self._side), int(self._files.labels[index])
        except UnreadableImageError as error:
            # Leaving it out now would change the order of the others, on this rank alone.
            raise UserError(
                f"{path} could be read when the run began, and now it cannot: {error}. Bring it "
                "back and go on with --resume, or start a new run without it."
            ) from error
