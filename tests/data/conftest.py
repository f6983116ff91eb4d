from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from rjax.data import DataError

Refuses = Callable[[str], AbstractContextManager[None]]


@pytest.fixture
def refuses() -> Refuses:
    """Return a context that demands a `DataError` of one sentence on one line."""

    @contextmanager
    def check(match: str) -> Iterator[None]:
        with pytest.raises(DataError, match=match) as caught:
            yield
        message = str(caught.value)
        assert "\n" not in message and message.endswith(".")
        assert "; " in message or ": " in message, "it must end with what to do"

    return check
