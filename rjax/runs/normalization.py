"""`--normalize`: images of mean 0 and standard deviation 1, on the host, once."""

import dataclasses
from typing import Any

import numpy as np

from rjax.data import Dataset
from rjax.data.augment import Normalize
from rjax.data.examples import fingerprint_of, is_lazy, with_fingerprint
from rjax.runs.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Normalization:
    """A product and a sum for every channel, computed in float32.

    Attributes:
        name: of the preset.
        factor: one for each channel.
        offset: likewise; what black becomes.
    """

    name: str
    factor: tuple[float, ...]
    offset: tuple[float, ...]

    @classmethod
    def preset(cls, name: str) -> "Normalization":
        """Return that of `rjax.data.augment.Normalize.preset`."""
        known = Normalize.preset(name)
        mean, std = (np.atleast_1d(np.asarray(x)) for x in (known.mean, known.std))
        factor, offset = (x.astype(np.float32) for x in (1 / std, -mean / std))
        return cls(name, tuple(factor.tolist()), tuple(offset.tolist()))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return float32 images in [0, 1], with channels last, normalized."""
        factor, offset = (np.asarray(x, np.float32) for x in (self.factor, self.offset))
        return images * factor + offset

    def dataset(self, data: Dataset) -> Dataset:
        """Return a data set with all its images normalized.

        Raises:
            UsageError: the images have another number of channels.
        """
        train, test = (self._examples(x, data.name) for x in (data.train, data.test))
        return dataclasses.replace(data, train=train, test=test)

    def _examples(self, examples: Any, name: str) -> Any:
        if is_lazy(examples):
            self._check(examples[0][0], name)
            found = examples.map(_One(self))
            return with_fingerprint(found, fingerprint_of(examples))
        images, labels = examples
        self._check(images, name)
        return self(images), labels

    def _check(self, images: np.ndarray, name: str) -> None:
        wanted, got = len(self.factor), images.shape[-1]
        if wanted != got:
            raise UsageError(
                f"--normalize {self.name} is for images of {wanted} channels, those "
                f"of {name} have {got}: leave it out"
            )


@dataclasses.dataclass(frozen=True)
class _One:
    """Normalizes the image of a pair."""

    change: Normalization

    def __call__(self, element: Any) -> Any:
        image, label = element
        return self.change(image), label
