"""The one error that means: the caller of the command line has to change something."""


class UsageError(Exception):
    """Bad input to a command; its text is one line with the remedy."""
