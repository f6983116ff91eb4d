import os
import pickle
import struct
import warnings

import numpy as np
import pytest

from rjax.data.pickles import load_pickle

NUMBERS = np.arange(12, dtype=np.uint8).reshape(3, 4)


class Call:
    """Pickles as a call, which a plain `pickle.loads` would make."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def python2(array, labels):
    """Return the dict as Python 2 with NumPy 1 pickled it, in protocol 2."""

    def text(value):
        return b"T" + struct.pack("<I", len(value)) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    shape = b"(" + b"".join(map(number, array.shape)) + b"t"
    return b"".join(
        [
            b"\x80\x02}(",
            *(text(b"data"), b"cnumpy.core.multiarray\n_reconstruct\n"),
            *(b"cnumpy\nndarray\n", b"(", number(0), b"t", text(b"b"), b"\x87R"),
            *(b"(", number(1), shape, b"cnumpy\ndtype\n"),
            *(text(b"u1"), number(0), number(1), b"\x87R"),
            *(b"(", number(3), text(b"|"), b"NNN", number(-1), number(-1)),
            *(number(0), b"tb", b"\x89", text(array.tobytes()), b"tb"),
            *(text(b"labels"), b"](", *map(number, labels), b"eu."),
        ]
    )


def test_a_pickle_of_python_2():
    found = load_pickle(python2(NUMBERS, [3, 1]), "file")
    assert list(found) == [b"data", b"labels"] and found[b"labels"] == [3, 1]
    assert found[b"data"].dtype == np.uint8
    np.testing.assert_array_equal(found[b"data"], NUMBERS)


def test_that_pickle_is_a_real_one():
    # The same bytes, through NumPy's own hooks: the writer above is none of ours.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the 0 that NumPy 1 wrote for False
        found = pickle.loads(python2(NUMBERS, [3, 1]), encoding="bytes")
    np.testing.assert_array_equal(found[b"data"], NUMBERS)


@pytest.mark.parametrize("protocol", range(5))
@pytest.mark.parametrize("dtype", ["u1", ">i4", "<f8", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_in_every_protocol(protocol, dtype, order):
    array = np.asarray(NUMBERS, dtype, order=order)
    found = load_pickle(pickle.dumps({"x": array, b"y": [1]}, protocol), "file")
    assert found[b"y"] == [1] and found["x"].dtype == array.dtype
    np.testing.assert_array_equal(found["x"], array)


@pytest.mark.parametrize(
    "module", [b"numpy.core.multiarray", b"numpy._core.multiarray"]
)
def test_both_names_of_numpys_module(module):
    content = pickle.dumps(NUMBERS, 2)
    for name in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        content = content.replace(b"c" + name + b"\n", b"c" + module + b"\n")
    assert module in content
    np.testing.assert_array_equal(load_pickle(content, "file"), NUMBERS)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ["touch {}"]),
        (eval, ["open({!r}, 'w').close()"]),
        (os.mkdir, ["{}"]),
        (np.save, ["{}", 0]),
    ],
    ids=["system", "eval", "mkdir", "save"],
)
def test_code_is_refused_and_not_run(tmp_path, refuses, protocol, function, arguments):
    mark = tmp_path / "mark"
    call = Call(function, (arguments[0].format(str(mark)), *arguments[1:]))
    content = pickle.dumps({b"data": call}, protocol)
    with refuses(rf"^file asks for \w+\.{function.__name__}, .* refuses to run code"):
        load_pickle(content, "file")
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists() or mark.with_suffix(".npy").exists(), "the test can tell"


def test_what_is_admitted_cannot_be_changed_for_the_next_file():
    change = b"c_codecs\nencode\n(N}Vmark\nI1\nstb."  # BUILD sets an attribute
    assert load_pickle(change, "file").mark == 1
    assert not hasattr(load_pickle(b"c_codecs\nencode\n.", "file"), "mark")


def test_persistent_ids_are_refused(refuses):
    with refuses("^file refers to objects outside of it"):
        load_pickle(b"Pname\n.", "file")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps(NUMBERS)[:-20],
        pickle.dumps(NUMBERS, 2).replace(b"u1", b"O1"),
        pickle.dumps(NUMBERS, 2).replace(b"latin1", b"base64"),
        pickle.dumps(NUMBERS, 2).replace(b"K\x03K\x04", b"K\x03K\x05"),
        b"cnumpy\nndarray\n(tR.",
        pickle.dumps(np.array([{}], object)),
        pickle.dumps(np.array([b"text"])),
    ],
)
def test_damaged_pickles(refuses, content):
    with refuses("^file is no pickle of arrays, or is damaged; download it again"):
        load_pickle(content, "file")
