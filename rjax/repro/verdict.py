"""The verdict on two records."""

from rjax.repro.bits import is_float
from rjax.repro.comparison import (
    ColumnDifference,
    Distance,
    Finding,
    Tolerance,
    Verdict,
)
from rjax.repro.scan import Digests, Steps


def judge(
    steps: Steps,
    digests: Digests,
    gradients: Digests | None,
    found: tuple[Finding, ...],
    apart: tuple[int, tuple[Distance, ...]] | None,
    tolerance: Tolerance,
) -> tuple[Verdict, str]:
    """Return the verdict, and the sentence that says what it rests on.

    Args:
        steps: comparison of the steps.
        digests: comparison of the digests of the state.
        gradients: the same of the gradients, `None` if not both runs have them.
        found: differences that are not of bits.
        apart: distances of the last snapshots in common, if any follow a difference.
        tolerance: what is still numerically equivalent.
    """
    seen = f"{steps.common} steps and {digests.common} rows of digests"
    if gradients is not None:
        seen += f", and the gradients of {gradients.common} steps"
    kinds = {finding.kind for finding in found}
    rows = [digests] if gradients is None else [digests, gradients]
    differs = steps.columns or any(x.step is not None for x in rows)
    if not differs and not kinds & {"shape", "dtype"}:
        if "lacks" in kinds:
            return "incomplete", f"Nothing differs in {seen}, but not all is in both."
        return "bit-identical", f"All bits are equal: {seen}."
    if not steps.common:
        return "diverged", "The records have no step in common."
    if "shape" in kinds:
        return "diverged", "Tensors are of another shape: these are two models."
    bound = tolerance.relative_scalars
    columns = [x for x in steps.columns if _exact(x) or x.largest > bound]
    if columns:
        worst = ", ".join(map(_far, columns[:3]))
        return (
            "diverged",
            f"Numbers of the steps differ: {worst}; {bound:g} is allowed.",
        )
    scalars = f"All numbers of {steps.common} steps lie within {bound:g}"
    if apart is None:
        why = "no snapshot in common follows the first difference"
        return "numerically equivalent", f"{scalars}; by them alone, as {why}."
    step, regions = apart
    bound = tolerance.relative_tensors
    worst = max(regions, key=lambda region: region.relative, default=None)
    if worst is not None and worst.relative > bound:
        far = f"{worst.tensor} lies {worst.relative:.2g} apart"
        return "diverged", f"After {step} steps {far}; {bound:g} is allowed."
    tensors = f"all tensors of the snapshots after {step} steps within {bound:g}"
    return "numerically equivalent", f"{scalars}, {tensors}."


def _exact(column: ColumnDifference) -> bool:
    """Return whether a column must be equal whatever the tolerance."""
    return column.name == "scale" or not is_float(column.a.dtype)


def _far(column: ColumnDifference) -> str:
    if _exact(column):
        return f"{column.name}, which must be equal"
    return f"{column.name} by up to {column.largest:.2g}"
