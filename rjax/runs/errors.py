"""The one error that means: the caller of the command line has to change something."""

import errno

# No room: on the disk, in a quota, in the largest file that is allowed.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UsageError(Exception):
    """Bad input to a command; its text is one line with the remedy."""
