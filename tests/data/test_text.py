"""Characters of a text: windows, what follows in them, and what is held out."""

import numpy as np
import pytest

import rjax
from rjax.data import load_text


def _read(dataset, codes):
    return "".join("_" if i < 0 else dataset.class_names[i] for i in codes)


def test_the_zen_is_the_same_everywhere(capsys):
    zen = load_text()
    assert capsys.readouterr().out == ""
    assert zen.name == "zen" and zen.num_classes == 45
    whole = _read(zen, zen.train[0][:, 0])
    assert whole.startswith("The Zen of Python, by Tim Peters\n\nBeautiful is better")
    assert zen.fingerprint == load_text().fingerprint


def test_windows_start_everywhere_and_end_with_their_part():
    data = load_text("abcabcabd", length=3, test_fraction=0.34)
    assert data.class_names == ("a", "b", "c", "d") and data.name == "text"
    inputs, targets = data.train
    assert inputs.dtype == targets.dtype == np.int32
    assert [_read(data, row) for row in targets] == ["bca", "cab", "abc", "bc_", "c__"]
    assert [_read(data, row)[0] for row in inputs] == list("abcab")
    # What has a target is what stands before it; the held-out part starts anew.
    for row, after in zip(inputs, targets, strict=True):
        known = (after >= 0).sum()
        assert (row[1:known] == after[: known - 1]).all()
    assert [_read(data, row) for row in data.test[1]] == ["bd_", "d__"]


def test_batches_come_as_of_any_other_set():
    zen = load_text(length=4)
    (inputs, targets), *_ = rjax.data.train_batches(zen.train, 8, stop=1)
    assert inputs.shape == targets.shape == (8, 4)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"text": "aaaa"}, "at least two different characters, got 1"),
        ({"text": ""}, "at least two different characters, got 0"),
        ({"length": 0}, "`length` must be at least 1, got 0"),
        ({"text": "abc"}, "less than two characters of 3"),
        ({"test_fraction": 1.0}, "`test_fraction`"),
    ],
)
def test_what_cannot_be_cut_is_told(arguments, match):
    with pytest.raises(ValueError, match=match):
        load_text(**arguments)
