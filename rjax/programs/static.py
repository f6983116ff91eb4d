"""Proof that a program asks the host for nothing while it runs."""

import re
from collections.abc import Iterator

# In the text of a compiled program, or of StableHLO: whatever reaches the host.
_CALLBACK = re.compile(r'custom_call_target="([^"]*callback[^"]*)"', re.IGNORECASE)
_STABLE_CALLBACK = re.compile(
    r'stablehlo\.custom_call"?[ (]*@"?([\w.$]*callback[\w.$]*)', re.IGNORECASE
)
_STABLE_TARGET = re.compile(r'call_target_name = "([^"]*callback[^"]*)"', re.IGNORECASE)
_FEED = re.compile(r"(?<=[\s})\]])(infeed|outfeed)\(")
_HOST_CHANNEL = re.compile(r"(?<=[\s})\]])(send|recv)\(.*is_host_transfer=true")
_STABLE_FEED = re.compile(r"(stablehlo\.(?:infeed|outfeed|send|recv))\b")
_HOST_MEMORY = re.compile(r"\{[^{}]*S\(5\)[^{}]*\}")
_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_NAME = re.compile(r'op_name="([^"]*)"')


class NotStaticError(AssertionError, ValueError):
    """A program would reach the host while it runs."""


def host_traffic(text: str) -> Iterator[str]:
    """Yield what in a program's text reaches the host, each with where it came from.

    Args:
        text: of a compiled program or of its StableHLO.
    """
    for line in text.splitlines():
        if found := _reaches_host(line):
            name, source = _NAME.search(line), _SOURCE.search(line)
            origin = f" ({name[1]})" if name else ""
            place = f" at {source[1]}:{source[2]}" if source and source[2] else ""
            yield f"{found}{origin}{place}"


def _reaches_host(line: str) -> str:
    """Return what in a line reaches the host, or ""."""
    for pattern in (_CALLBACK, _STABLE_CALLBACK, _STABLE_TARGET):
        if found := pattern.search(line):
            return f"a host callback, `{found[1]}`"
    for pattern in (_STABLE_FEED, _FEED, _HOST_CHANNEL):
        if found := pattern.search(line):
            return f"a transfer, `{found[1]}`"
    if _HOST_MEMORY.search(line):
        return "an array in host memory"
    return ""


def check(text: str, name: str) -> None:
    """Refuse a program that reaches the host.

    Raises:
        NotStaticError: with the first instruction that does.
    """
    for found in host_traffic(text):
        raise NotStaticError(
            f"{name} is not static: it has {found}; take it out of the step, or keep "
            "what it needs in the report."
        )
