"""What goes wrong with records."""


class RecordError(ValueError):
    """A record cannot be used; the message says why and what to do.

    Example:
        >>> import rjax
        >>> try:
        ...     rjax.repro.compare("no/such/run", "no/such/run")
        ... except rjax.repro.RecordError as error:
        ...     print(error)
        no/such/run...
    """
