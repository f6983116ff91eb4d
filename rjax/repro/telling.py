"""A comparison in words: the verdict first, then where, then likeliest causes."""

from collections.abc import Iterator

from rjax.digests import Tensor
from rjax.repro.bits import Bits, is_float
from rjax.repro.comparison import (
    Comparison,
    Difference,
    GradientDifference,
    StateDifference,
)
from rjax.repro.scan import when
from rjax.repro.structure import listed
from rjax.repro.tracks import Track

# Columns that are told one by one.
_COLUMNS = 12
_CAUSES, _OTHERWISE = "Likeliest causes, by the manifests", "What the manifests say"
_DIFFERENT = ("diverged", "numerically equivalent")


def text(found: Comparison) -> str:
    """Return a comparison as lines."""
    lines = [headline(found), found.reason, "", *_courses(found)]
    for title, part in sections(found):
        lines += ["", title, *(f"  {line}" for line in part)]
    return "\n".join(lines)


def headline(found: Comparison) -> str:
    """Return the verdict, with the step at which the runs part."""
    if found.first is None:
        return found.verdict
    first = found.first
    if not isinstance(first, StateDifference):
        return f"{found.verdict}: first difference in step {first.step}, {first.name}"
    where = f"{found.verdict}: first difference in the state, {first.name}"
    if first.equal is None:
        begun = first.step in (found.a.first, found.b.first)
        when = "before the first step" if begun else f"after {first.step} steps"
        return f"{where}, {when}, in the first digests in common"
    if first.step - first.equal == 1:
        return f"{where}, after {first.step} steps"
    return (
        f"{where}, between step {first.equal} (equal) and step {first.step} (differs)"
    )


def sections(found: Comparison) -> Iterator[tuple[str, list[str]]]:
    """Yield (title, lines) of what there is to say below the verdict."""
    parts = {
        "Where": [*_where(found)],
        causes_title(found): causes(found),
        "Not the same in both records": [finding.text for finding in found.findings],
        "Loss scale": [*scales(found.a, found.b)],
        "Snapshots": [*_regions(found)],
    }
    return ((title, lines) for title, lines in parts.items() if lines)


def causes_title(found: Comparison) -> str:
    """Return what stands above the differences of the manifests."""
    return _CAUSES if found.verdict in _DIFFERENT else _OTHERWISE


def causes(found: Comparison) -> list[str]:
    """Return what may be the cause, the likeliest first."""
    lines = [str(cause) for cause in found.causes.found]
    if not (lines or found.causes.notes) and found.verdict in _DIFFERENT:
        lines = [
            "The manifests agree: what differs is not in them, such as an order of "
            "additions that changes from run to run."
        ]
    return [*lines, *found.causes.notes]


def scales(a: Track, b: Track) -> Iterator[str]:
    """Yield the histories of the loss scale, where they part, and the skips."""
    if a.scales and a.scales == b.scales:
        yield f"A and B: {_history(a)}"
    elif a.scales or b.scales:
        yield f"A: {_history(a)}"
        yield f"B: {_history(b)}"
        low, high = max(a.first, b.first), min(a.last, b.last)
        # Entries at which only one of the two changes, or changes to something else.
        begun = a.first != b.first  # the first entries then are no changes
        odd = sorted({step for step, _ in {*a.scales[begun:]} ^ {*b.scales[begun:]}})
        if odd := [step for step in odd if low <= step <= high]:
            yield f"They change differently in steps {listed(odd)}."
    if a.skipped == b.skipped:
        if a.skipped:
            yield f"Steps skipped: {a.skipped} in both."
    else:
        yield f"Steps skipped: {_count(a.skipped)} in A, {_count(b.skipped)} in B."


def values(a: Bits, b: Bits, ulps: int | None) -> str:
    """Return two values with their bits, and how far they lie apart."""
    apart = "" if ulps is None else f", {ulps:,} ULP apart"
    return f"{a} in A, {b} in B{apart}"


def grouped(tensors: tuple[Tensor, ...]) -> dict[str, list[Tensor]]:
    """Return tensors by region, or by field of the state outside all regions."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.region or tensor.field, []).append(tensor)
    return groups


def _courses(found: Comparison) -> Iterator[str]:
    for name, track in (("A", found.a), ("B", found.b)):
        digests = f"digests every {track.every} steps" if track.every else "no digests"
        digests += ", of gradients too" if track.gradients else ""
        steps = f"steps {track.first} to {track.last}"
        yield f"{name}  {track.folder}: {steps}, {digests}"


def _where(found: Comparison) -> Iterator[str]:
    """Yield what differs, in the order in which it came about."""
    first = found.first
    if first is None:
        return
    if first is not found.state and _digested(found, first.step):
        yield (
            f"The state before step {first.step} is equal: its batch differs, or what "
            "is computed from it."
        )
    parts: list[tuple[Difference, Iterator[str]]] = []
    if found.state is not None:
        parts.append((found.state, _state(found.state)))
    if found.columns:
        parts.append((found.columns[0], _columns(found)))
    if found.gradients is not None:
        parts.append((found.gradients, _gradients(found.gradients)))
    for _, lines in sorted(parts, key=lambda part: when(part[0])):
        yield from lines


def _columns(found: Comparison) -> Iterator[str]:
    for column in found.columns[:_COLUMNS]:
        both = values(column.a, column.b, column.ulps)
        yield f"Step {column.step}, {column.name}: {both}"
        times = f"{column.count:,} of {found.compared[0]:,} steps"
        far = f", by up to {column.largest:.2g}" if is_float(column.a.dtype) else ""
        yield f"  it differs in {times}{far}"
    if len(found.columns) > _COLUMNS:
        yield f"... and {len(found.columns) - _COLUMNS} more columns"


def _digested(found: Comparison, step: int) -> bool:
    """Return whether digests show that the state before a step is equal."""
    if found.equal is None or step > found.equal:
        return False
    return all(
        track.every and (step % track.every == 0 or step == track.first)
        for track in (found.a, found.b)
    )


def _state(state: StateDifference) -> Iterator[str]:
    since = (
        "the first digests in common"
        if state.equal is None
        else f"equal after {state.equal}"
    )
    many = f"{len(state.tensors)} of {state.compared} tensors differ"
    yield f"State after {state.step} steps ({since}): {many}"
    yield from _tensors(state)
    if (element := state.element) is not None:
        both = values(element.a, element.b, element.ulps)
        place = f"[{', '.join(map(str, element.index))}]"
        yield f"  {state.name}{place}, flat index {element.flat}: {both}"
        yield f"  {element.count:,} of its {element.size:,} elements differ"
    else:
        yield f"  {state.hint}"


def _gradients(found: GradientDifference) -> Iterator[str]:
    since = (
        "the first in common"
        if found.equal is None
        else f"those of step {found.equal} are equal"
    )
    many = f"{len(found.tensors)} of {found.compared} differ"
    yield f"Gradients of step {found.step} ({since}): {many}"
    yield from _tensors(found)


def _tensors(found: StateDifference | GradientDifference) -> Iterator[str]:
    for region, tensors in grouped(found.tensors).items():
        yield f"  {region}: {listed(tensor.name for tensor in tensors)}"
    yield f"  digest of {found.name}: 0x{found.a} in A, 0x{found.b} in B"


def _regions(found: Comparison) -> Iterator[str]:
    if found.distances is None:
        return
    step, regions = found.distances
    yield f"Largest ||a - b|| / ||a|| in each region, after {step} steps:"
    apart = [region for region in regions if region.relative]
    for region in apart:
        yield f"  {region.region}: {region.relative:.2g} ({region.tensor})"
    if rest := len(regions) - len(apart):
        yield f"  0 in {rest} {'other ' if apart else ''}regions"


def _history(track: Track) -> str:
    if not track.scales:
        return "not recorded"
    (_, first), *changes = track.scales
    steps = listed(f"{scale:g} from step {step}" for step, scale in changes)
    return f"{first:g}, {steps}" if changes else f"{first:g} throughout"


def _count(number: int | None) -> str:
    return "not recorded" if number is None else str(number)
