"""How two records are built differently: columns, tensors, steps, digests."""

from collections.abc import Iterable, Iterator

from rjax.repro.comparison import Finding, Kind
from rjax.repro.opened import Opened
from rjax.repro.scan import Digests, Steps
from rjax.repro.tracks import Track

# Names that are listed before the rest is counted.
LISTED = 5


def findings(
    a: Opened, b: Opened, steps: Steps, digests: Digests, gradients: Digests | None
) -> tuple[Finding, ...]:
    """Return every difference between two records that is not one of bits."""
    return (
        *_columns(a, b),
        *_tensors(a, b),
        *_steps(steps),
        *_digests(a, b, digests),
        *_gradients(a, b, gradients),
        *_notes(a, b, steps.tracks),
    )


def listed(names: Iterable[object]) -> str:
    """Return a few names, and how many there are more.

    Example:
        >>> listed("abc"), listed("abcdefgh")
        ('a, b, c', 'a, b, c, d, e and 3 more')
    """
    words = [str(name) for name in names]
    more = f" and {len(words) - LISTED} more" if len(words) > LISTED else ""
    return ", ".join(words[:LISTED]) + more


def _columns(a: Opened, b: Opened) -> Iterator[Finding]:
    yield from _only("columns", a.columns, b.columns)
    for name, (_, dtype) in a.columns.items():
        other = b.columns.get(name, (0, dtype))[1]
        if other != dtype:
            yield Finding("dtype", f"Column {name} is {dtype} in A, {other} in B.")


def _tensors(a: Opened, b: Opened) -> Iterator[Finding]:
    left, right = ({t.name: t for t in x.layout.tensors} for x in (a, b))
    yield from _only("tensors", left, right)
    both = [(tensor, right[name]) for name, tensor in left.items() if name in right]
    kinds: dict[str, Kind] = {"shape": "shape", "dtype": "dtype", "region": "note"}
    for what, kind in kinds.items():
        # Many tensors change alike: with the precision, say.
        alike: dict[tuple[object, object], list[str]] = {}
        for one, other in both:
            values = getattr(one, what), getattr(other, what)
            if values[0] != values[1]:
                alike.setdefault(values, []).append(one.name)
        for (x, y), names in alike.items():
            difference = f"{what} {x or 'none'} in A, {y or 'none'} in B"
            yield Finding(kind, f"Of another {what}: {difference}: {listed(names)}.")


def _only(what: str, left: dict, right: dict) -> Iterator[Finding]:
    for name, mine, others in (("A", left, right), ("B", right, left)):
        if only := [x for x in mine if x not in others]:
            yield Finding("lacks", f"Only {name} has the {what} {listed(only)}.")


def _steps(steps: Steps) -> Iterator[Finding]:
    a, b = steps.tracks
    if not steps.common:
        bounds = f"A has {a.first} to {a.last}, B {b.first} to {b.last}"
        yield Finding("lacks", f"No step is in common: {bounds}.")
        return
    if a.first != b.first:
        early, late = ("A", "B") if a.first < b.first else ("B", "A")
        low, high = sorted((a.first, b.first))
        text = f"{late} begins at step {high}, {early} at step {low} already."
        yield Finding("lacks", text)
    if a.last != b.last:
        short, long = ("A", "B") if a.last < b.last else ("B", "A")
        low, high = sorted((a.last, b.last))
        text = f"{short} is shorter: it ends with step {low}, {long} with step {high}."
        yield Finding("lacks", text)
    for name, track in (("A", a), ("B", b)):
        if track.gaps:
            gaps = listed(f"{i} to {j}" for i, j in track.gaps)
            kind = "note" if a.gaps == b.gaps else "lacks"
            yield Finding(kind, f"The steps of {name} skip numbers, from {gaps}.")
    same = a.first == b.first and a.last == b.last and a.gaps == b.gaps
    if same and steps.common < max(a.steps, b.steps):
        yield Finding("lacks", "Later on, A and B leave out other steps.")


def _digests(a: Opened, b: Opened, digests: Digests) -> Iterator[Finding]:
    every = a.layout.every, b.layout.every
    words = ", ".join(
        f"{name} has one every {n} steps" if n else f"{name} has none"
        for name, n in zip("AB", every, strict=True)
    )
    if not digests.common:
        text = f"No digest of the state is in common ({words}): it was not compared."
        yield Finding("lacks", text)
    elif every[0] != every[1]:
        text = f"Digests of the state come in other steps: {words}; {digests.common}"
        yield Finding("note", f"{text} rows are in common.")
    elif any(digests.alone):
        yield _alone("Digests", digests)


def _gradients(a: Opened, b: Opened, digests: Digests | None) -> Iterator[Finding]:
    if digests is None:
        for name, record in (("A", a), ("B", b)):
            if record.gradients is not None:
                text = f"Only {name} has digests of gradients: they were not compared."
                yield Finding("note", text)
    elif a.layout.every == b.layout.every and any(digests.alone):
        yield _alone("Digests of gradients", digests)


def _alone(what: str, digests: Digests) -> Finding:
    counts = zip("AB", digests.alone, strict=True)
    alone = " and ".join(f"{n} of {name}" for name, n in counts if n)
    return Finding("lacks", f"{what} of steps that both have: {alone} stand alone.")


def _notes(a: Opened, b: Opened, tracks: tuple[Track, Track]) -> Iterator[Finding]:
    if a.folder.resolve() == b.folder.resolve():
        yield Finding("note", "A and B are one and the same folder.")
    for name, track in zip("AB", tracks, strict=True):
        if track.cut_off:
            text = f"{name} ends within a row, as a run does that is killed"
            yield Finding("note", f"{text}; all rows before that were compared.")
