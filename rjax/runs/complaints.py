"""The complaints of the option parser, made into one line."""

import difflib
import re


def one_line(box: str) -> str:
    """Return tyro's complaint as one line: its first part and what it proposes.

    It comes as a title, a message, proposals and a pointer to the help, with rules
    between them and, where the terminal shows such characters, a frame around them.

    Example:
        >>> print(one_line('''╭─ Unrecognized options ─────╮
        ... │ Unrecognized options: --ep │
        ... │ ────────────────────────── │
        ... │ Perhaps you meant:         │
        ... │     --warmup-epochs FLOAT  │
        ... │     --epochs INT           │
        ... │ ────────────────────────── │
        ... │ For full helptext, ...     │
        ... ╰────────────────────────────╯'''))
        unrecognized options: --ep, did you mean --epochs?
    """
    framed = box.lstrip().startswith("╭")
    rows = [row.strip("│ ") for row in box.strip().splitlines()]
    text = "\n".join(rows[1:-1] if framed else rows[2:])
    message, *sections = re.split(r"^[─-]+$", text, flags=re.MULTILINE)
    words = message.split()
    if not words:
        return "the options could not be read"
    message = _plain(" ".join(words).rstrip("."), text)
    given = re.findall(r"--[\w-]+", message)
    similar = re.findall(r"^--[\w-]+", "\n".join(sections[:-1]), re.MULTILINE)
    # An option that was given but could not be read is listed too, with its help.
    similar = [name for name in similar if name not in given]
    closest = [
        difflib.get_close_matches(name, similar, n=1, cutoff=0) for name in given
    ]
    names = dict.fromkeys(name for found in closest for name in found)
    hint = f", did you mean {' and '.join(names)}?" if names else ""
    return f"{message[:1].lower()}{message[1:]}{hint}"


def _plain(message: str, text: str) -> str:
    """Say a value that could not be read without the parser's own words for it."""
    message = message.removesuffix(". Expected 1 values")
    unreadable = re.match(r"[Ee]rror parsing (--[\w-]+):", message)
    if unreadable is None:
        return message
    name = unreadable.group(1)
    kind = re.search(rf"^{name} (.*)$", text, re.MULTILINE)
    takes = f"takes {kind.group(1).split()[0]}" if kind else "cannot take that"
    got = re.findall(r"'([^']*)'", message)
    return f"{name} {takes}, got {got[-1]!r}" if got else f"{name} {takes}"
