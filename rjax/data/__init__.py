"""Data sets, and batches as pure functions of seed and step."""

from rjax.data import augment as augment
from rjax.data.adapted import from_grain as from_grain
from rjax.data.arrays import from_arrays as from_arrays
from rjax.data.batches import batch_at as batch_at
from rjax.data.batches import batch_indices as batch_indices
from rjax.data.batches import evaluation_batches as evaluation_batches
from rjax.data.batches import steps_per_epoch as steps_per_epoch
from rjax.data.batches import train_batches as train_batches
from rjax.data.cifar import load_cifar10 as load_cifar10
from rjax.data.cifar import load_cifar100 as load_cifar100
from rjax.data.dataset import Dataset as Dataset
from rjax.data.digits import load_digits as load_digits
from rjax.data.errors import DataError as DataError
from rjax.data.examples import num_examples as num_examples
from rjax.data.examples import split as split
from rjax.data.folder import load_image_folder as load_image_folder
from rjax.data.idx import load_fashion_mnist as load_fashion_mnist
from rjax.data.idx import load_mnist as load_mnist
from rjax.data.prefetch import prefetch as prefetch
from rjax.data.text import load_text as load_text
