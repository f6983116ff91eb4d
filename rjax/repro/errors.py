"""What goes wrong with records."""


class RecordError(ValueError):
    """A record cannot be used; the message says why and what to do."""
