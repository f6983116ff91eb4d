"""The one error for data that cannot be used."""


class DataError(ValueError):
    """Data that cannot be used as it is.

    The message is one sentence on one line: it names the file or the example, says
    what is wrong with it, and ends with what to do. What a decoder or the operating
    system said is its `__cause__`.

    Example:
      >>> raise DataError("some/file is empty; download it again")
      Traceback (most recent call last):
      ...
      rjax.data.errors.DataError: some/file is empty; download it again
    """
