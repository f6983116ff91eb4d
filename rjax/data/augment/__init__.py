"""Image augmentation as pure functions of a key, for a whole batch on the device.

Every augmentation is a small frozen value that is called with a key and a batch of
images, `[batch, height, width, channels]`, and returns a batch; `Chain` makes one of
several. They are ordinary JAX: jit them, or call them in the body of a `lax.scan`.

>>> import jax, jax.numpy as jnp
>>> change = Chain(
...     RandomCrop(pad=4), RandomHorizontalFlip(), Normalize.preset("cifar10")
... )
>>> images = jnp.zeros((8, 32, 32, 3), jnp.float16)
>>> jax.jit(change)(jax.random.key(0), images).shape
(8, 32, 32, 3)

- **Two halves.** `draw(key, shape)` returns the random numbers by name, one row per
  image, and `apply(images, drawn)` makes of them what it is told: each class is drawn
  numbers for one function of this module (`RandomCrop` for `crop`), which serves alone
  where the numbers are known. Options are Python numbers; a program is compiled once
  for them.
- **Randomness.** Each image has its own draw. The same key, shape and options draw the
  same bits. With JAX's default generator, what image i draws depends on the key and on
  i alone, not on how many images there are; with others (`rbg`) or with
  `jax_threefry_partitionable` off it depends on their number too. Inside `shard_map`
  every device counts its images from 0: give each its own key, with
  `jax.random.fold_in(key, jax.lax.axis_index(...))`.
- **Dtypes.** float16, bfloat16, float32 and uint8 go in, and the same comes out, but
  for `Normalize`, which makes float32 of uint8. What only moves pixels keeps their
  bits; what mixes them computes in float32 and rounds once, uint8 to the nearest whole
  number. There, a jitted program may differ from an eager one in the last place.
"""

from rjax.data.augment.color import ColorJitter as ColorJitter
from rjax.data.augment.color import adjust_color as adjust_color
from rjax.data.augment.cropping import RandomCrop as RandomCrop
from rjax.data.augment.cropping import crop as crop
from rjax.data.augment.erasing import RandomErasing as RandomErasing
from rjax.data.augment.erasing import erase as erase
from rjax.data.augment.flipping import RandomHorizontalFlip as RandomHorizontalFlip
from rjax.data.augment.flipping import horizontal_flip as horizontal_flip
from rjax.data.augment.normalization import Normalize as Normalize
from rjax.data.augment.normalization import normalize as normalize
from rjax.data.augment.resizing import RandomResizedCrop as RandomResizedCrop
from rjax.data.augment.resizing import resized_crop as resized_crop
from rjax.data.augment.structure import Augmentation as Augmentation
from rjax.data.augment.structure import Chain as Chain
from rjax.data.augment.warping import RandomAffine as RandomAffine
from rjax.data.augment.warping import RandomRotation as RandomRotation
from rjax.data.augment.warping import RandomScale as RandomScale
from rjax.data.augment.warping import affine as affine
