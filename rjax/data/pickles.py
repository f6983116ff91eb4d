"""Pickles of arrays and plain containers, read without running any code of theirs."""

import io
import pickle
from typing import Any

import numpy as np

from rjax.data.errors import DataError


def load_pickle(content: bytes, path: str) -> Any:
    """Return what a pickle holds, if it holds only arrays of numbers and containers.

    Equals `pickle.loads(content, encoding="bytes")`, with which Python 3 reads what
    Python 2 has written, except that the pickle may name nothing but what NumPy, 1 or
    2, names to build an array, and that this is not what builds it. Arrays may be the
    whole of it or the values of a dict, as in CIFAR.

    Args:
      content: bytes of the file.
      path: of the file, for messages.

    Raises:
      DataError: the pickle names something else, or is damaged.

    Example:
      >>> load_pickle(pickle.dumps({"labels": [1, 2]}), "file")
      {'labels': [1, 2]}
    """
    try:
        found = _Restricted(content, path).load()
        if isinstance(found, dict):
            return {key: _unwrapped(value) for key, value in found.items()}
        return _unwrapped(found)
    except DataError:
        raise
    except Exception as error:  # the pickle module: "any" may come of a damaged one
        raise DataError(
            f"{path} is no pickle of arrays, or is damaged; download it again."
        ) from error


class _Restricted(pickle.Unpickler):
    def __init__(self, content: bytes, path: str) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._path = path
        self._admitted = _admitted()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._admitted:
            raise DataError(
                f"{self._path} asks for {module}.{name}, and rjax refuses to run code "
                "from a pickle; do not trust this file, download it again."
            )
        return self._admitted[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise DataError(
            f"{self._path} refers to objects outside of it, and rjax refuses to run "
            "code from a pickle; do not trust this file, download it again."
        )


class _Array:
    """Takes the state of an array, and makes one of it without NumPy's own hooks."""

    array: np.ndarray

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        flat = np.frombuffer(content, dtype.name)
        self.array = flat.reshape(shape, order="F" if fortran else "C")


class _Dtype:
    """Takes the state of a dtype, of which only the byte order is of use."""

    def __init__(self, name: Any) -> None:
        self.name = name.decode() if isinstance(name, bytes) else str(name)
        if np.dtype(self.name).kind not in "biuf":
            raise ValueError(f"no dtype of numbers: {self.name}")

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode() if isinstance(state[1], bytes) else state[1]
        self.name = np.dtype(self.name).newbyteorder(order).str


def _unwrapped(value: Any) -> Any:
    return value.array if isinstance(value, _Array) else value


def _admitted() -> dict[tuple[str, str], Any]:
    # Made anew for every file: a pickle can set attributes of what it is given.
    def reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
        return _Array()

    def dtype(name: Any, align: Any = False, copy: Any = False) -> _Dtype:
        return _Dtype(name)

    def encode(text: str, encoding: Any) -> bytes:
        # How protocol 2 of Python 3 writes bytes; other codecs could be bombs.
        if encoding not in ("latin1", b"latin1"):
            raise ValueError(f"no encoding of bytes: {encoding!r}")
        return text.encode("latin1")

    return {
        ("numpy", "ndarray"): None,  # only to be named to `_reconstruct`
        ("numpy", "dtype"): dtype,
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        ("_codecs", "encode"): encode,
    }
