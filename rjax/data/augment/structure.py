"""What an augmentation is, and several one after the other."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Shaped

from rjax.data.augment.checks import check_images

Images = Shaped[Array, "batch height width channels"]
Step = Callable[[Any, Any], Any]


class Augmentation(abc.ABC):
    """A random change of a batch of images: numbers are drawn, then applied.

    A call is compiled, once for equal options and shapes; within a jitted function it
    becomes part of that. So a subclass must compare and hash by value: make it a frozen
    dataclass whose fields are numbers, strings and tuples.

    Example:
      >>> import jax.numpy as jnp
      >>> from rjax.data.augment import RandomHorizontalFlip
      >>> flip, images = RandomHorizontalFlip(1.0), jnp.arange(3.0).reshape(1, 1, 3, 1)
      >>> flip(jax.random.key(0), images).ravel()
      Array([2., 1., 0.], dtype=float32)
      >>> flip.draw(jax.random.key(0), images.shape)
      {'flipped': Array([ True], dtype=bool)}
    """

    @abc.abstractmethod
    def draw(self, key: Any, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        """Return the random numbers for images of a shape, `[batch, ...]` each."""

    @abc.abstractmethod
    def apply(self, images: Images, drawn: dict[str, jax.Array]) -> Images:
        """Return the images changed by what `draw` returned, or by numbers like it."""

    def __call__(self, key: Any, images: Images) -> Images:
        """Return `apply(images, draw(key, images.shape))`."""
        return _drawn_and_applied(self, key, check_images(images))


@dataclasses.dataclass(frozen=True, init=False)
class Chain:
    """Augmentations one after the other, each with a key of its own.

    Step i gets `jax.random.fold_in(key, i)`: a step added at the end leaves the draws
    of those before it as they are. Each step returns the dtype it was given, so half
    precision is rounded once a step; uint8 or float32 images that end in
    `Normalize(..., dtype=jnp.float16)` are rounded to half once.

    Args:
      *steps: functions `(key, images) -> images`, such as the values of this module,
        another chain, or a function of one's own.

    Raises:
      ValueError: a step cannot be called.

    Example:
      >>> import jax.numpy as jnp
      >>> from rjax.data.augment import RandomCrop, RandomHorizontalFlip
      >>> darker = lambda key, images: 0.5 * images
      >>> change = Chain(RandomCrop(pad=1), RandomHorizontalFlip(), darker)
      >>> change(jax.random.key(0), jnp.ones((1, 4, 4, 1))).max()
      Array(0.5, dtype=float32)
    """

    steps: tuple[Step, ...]

    def __init__(self, *steps: Step) -> None:
        for index, step in enumerate(steps):
            if not callable(step):
                raise ValueError(
                    f"step {index} of a Chain must be a function (key, images) -> "
                    f"images, got {type(step).__name__}; write Chain(first, second)."
                )
        object.__setattr__(self, "steps", steps)

    def __call__(self, key: Any, images: Images) -> Images:
        """Return the images after all steps."""
        for index, step in enumerate(self.steps):
            images = step(jax.random.fold_in(key, index), images)
        return images


@functools.partial(jax.jit, static_argnums=0)
def _drawn_and_applied(change: Augmentation, key: Any, images: Images) -> Images:
    return change.apply(images, change.draw(key, images.shape))
