"""What ends a command in one line, without a traceback."""

import errno

# No room: on the disk, in a quota, in the largest file that is allowed.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UsageError(Exception):
    """Bad input to a command; its text is one line with the remedy."""


class RunError(Exception):
    """A run that cannot go on, for no fault of its options; its text is one line."""
