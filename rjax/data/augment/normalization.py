"""Normalization by the mean and standard deviation of a data set."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from rjax.data.augment.checks import Fill, check_fill, check_images
from rjax.data.augment.sampling import as_dtype
from rjax.data.augment.structure import Images

# Of images in [0, 1] of the training set, as the examples of PyTorch have them.
_PRESETS: dict[str, tuple[Fill, Fill]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def normalize(images: Images, mean: Fill, std: Fill, dtype: Any = None) -> Images:
    """Return `(images - mean) / std`, uint8 images divided by 255 first.

    Computed as one product and one sum, whose constants are rounded once.

    Args:
      images: `[batch, height, width, channels]`, floating in [0, 1] or uint8.
      mean: of images in [0, 1], one number or one per channel.
      std: likewise, above 0.
      dtype: of the result, float16, bfloat16 or float32; if `None`, that of the images,
        or float32 for uint8.

    Returns:
      An array of the shape of the images, computed in float32 and rounded once.

    Raises:
      ValueError: images, `mean`, `std` or `dtype` are not as above.

    Example:
      >>> normalize(jnp.full((1, 1, 1, 3), 255, jnp.uint8), mean=0.5, std=0.25).ravel()
      Array([2., 2., 2.], dtype=float32)
    """
    images = check_images(images)
    if dtype is None:
        dtype = jnp.float32 if images.dtype == jnp.uint8 else images.dtype
    dtype = _check_dtype(dtype)
    centre = _per_channel(check_fill(mean, "mean"), "mean", images)
    spread = _per_channel(_check_std(std), "std", images)
    top = 255 if images.dtype == jnp.uint8 else 1
    factor = (1 / (top * spread)).astype(np.float32)
    offset = (-centre / spread).astype(np.float32)
    return as_dtype(images.astype(jnp.float32) * factor + offset, dtype)


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Bring images to mean 0 and standard deviation 1, as a step of a `Chain`.

    Nothing is random here: the key may be `None`.

    Args:
      mean: of images in [0, 1], one number or one per channel.
      std: likewise, above 0.
      dtype: of the result, as in `normalize`.

    Raises:
      ValueError: an option is not as above; when called, the images do not have as many
        channels.

    Example:
      >>> images = jnp.zeros((1, 28, 28, 1), jnp.uint8)
      >>> Normalize.preset("mnist", dtype=jnp.float16)(None, images).dtype
      dtype('float16')
      >>> Normalize.preset("cifar10")
      Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616), dtype=None)
    """

    mean: Fill
    std: Fill
    dtype: Any = None

    def __post_init__(self) -> None:
        check_fill(self.mean, "mean")
        _check_std(self.std)
        if self.dtype is not None:
            # Its name, so that equal ones print and compare alike.
            object.__setattr__(self, "dtype", str(_check_dtype(self.dtype)))

    @classmethod
    def preset(cls, name: str, dtype: Any = None) -> Self:
        """Return the normalization that is usual for a data set.

        Args:
          name: "mnist", "cifar10" or "imagenet".
          dtype: of the result, as in `normalize`.

        Raises:
          ValueError: for any other name.
        """
        if name not in _PRESETS:
            raise ValueError(
                f"`name` must be one of {', '.join(map(repr, _PRESETS))}, got {name!r};"
                " give Normalize a mean and a std for other data."
            )
        return cls(*_PRESETS[name], dtype)

    def __call__(self, key: Any, images: Images) -> Images:
        """Return `normalize(images, mean, std, dtype)`."""
        del key
        return normalize(images, self.mean, self.std, self.dtype)


def _check_std(std: Any) -> Fill:
    std = check_fill(std, "std")
    if min(std if isinstance(std, tuple) else (std,)) <= 0:
        raise ValueError(
            f"`std` must be above 0, got {std}; give the standard deviation of the "
            "images, 1.0 to leave their spread alone."
        )
    return std


def _check_dtype(dtype: Any) -> jnp.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = dtype
    if str(found) not in ("float16", "bfloat16", "float32"):
        raise ValueError(
            f"`dtype` must be float16, bfloat16 or float32, got {found}; leave it out "
            "to keep that of the images."
        )
    return found


def _per_channel(value: Fill, name: str, images: Images) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (images.shape[3],)):
        raise ValueError(
            f"`{name}` must be one number or one per channel, got {array.size} for "
            f"{images.shape[3]} channels; give as many as there are channels."
        )
    return array.reshape(1, 1, 1, -1)
