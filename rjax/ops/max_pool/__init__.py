"""Max pooling of images, with a gradient that is the same at every run."""

from rjax.ops.max_pool.api import max_pool as max_pool
from rjax.ops.max_pool.window import Window as Window
