"""What came out of a sweep: means and spreads, and which runs have the same bits."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rjax.plain import plain
from rjax.runs.sweeps.axes import Choice
from rjax.runs.sweeps.reading import Seen


@dataclasses.dataclass(frozen=True)
class Setting:
    """One combination of values, over all its seeds.

    Attributes:
        choice: its values.
        runs: those that finished.
        failed: those that did not.
        bits: letter of the class of settings whose masters have the same bits in the
            end, seed by seed; empty if a run failed or has no digests.
        agrees: up to how many steps its masters are those of the first setting, for
            the first seed; `None` if that is not known.
    """

    choice: Choice
    runs: tuple[Seen, ...]
    failed: tuple[Seen, ...]
    bits: str = ""
    agrees: int | None = None

    @property
    def name(self) -> str:
        """As a person reads it."""
        return self.choice.name

    def mean(self, of: str) -> float:
        """Return the mean over the seeds of a number of the runs, NaN without any."""
        values = self.values(of)
        return statistics.fmean(values) if values else float("nan")

    def spread(self, of: str) -> float:
        """Return the sample standard deviation over the seeds, NaN below two."""
        values = self.values(of)
        return statistics.stdev(values) if len(values) > 1 else float("nan")

    def values(self, of: str) -> list[float]:
        """Return a number of each run, such as "loss"."""
        return [float(getattr(run, of)) for run in self.runs]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What :func:`rjax.repro.sweep` found; print it, or let a notebook show it.

    Attributes:
        axes: names of what was varied.
        command: words that all runs share.
        seeds: which.
        settings: every combination, in the order of the values given.

    Example:
        >>> from rjax.runs.sweeps.axes import choices
        >>> found = choices({"rule": ["halving", "static"]})
        >>> losses = 0.25, 0.5
        >>> runs = [
        ...     Seen(choice, 0, f"runs/{choice.folder}", "", loss=loss, accuracy=0.9)
        ...     for choice, loss in zip(found, losses, strict=True)
        ... ]
        >>> done = Sweep.of(["rule"], ["rjax", "train"], found, [0], runs)
        >>> [(setting.name, setting.mean("loss")) for setting in done.settings]
        [('halving', 0.25), ('static', 0.5)]
    """

    axes: tuple[str, ...]
    command: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]

    @classmethod
    def of(
        cls,
        axes: Sequence[str],
        command: Sequence[str],
        choices: Sequence[Choice],
        seeds: Sequence[int],
        seen: Sequence[Seen],
    ) -> "Sweep":
        """Sort runs by their settings."""
        settings = []
        for choice in choices:
            mine = [run for run in seen if run.choice == choice]
            runs = tuple(run for run in mine if not run.error)
            settings.append(Setting(choice, runs, tuple(x for x in mine if x.error)))
        settings = _with_bits(settings, len(seeds))
        return cls(tuple(axes), tuple(command), tuple(seeds), tuple(settings))

    @property
    def failed(self) -> tuple[Seen, ...]:
        """Runs that left no results."""
        return tuple(run for setting in self.settings for run in setting.failed)

    @property
    def classes(self) -> dict[str, list[Setting]]:
        """Settings by the letter of their bits."""
        found: dict[str, list[Setting]] = {}
        for setting in self.settings:
            if setting.bits:
                found.setdefault(setting.bits, []).append(setting)
        return found

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows: the settings, and what came out."""
        heads = [
            *(self.axes or ("setting",)),
            *("runs", "test loss", "test accuracy, %", "skipped", "images/s", "bits"),
        ]
        return heads, [self._row(setting) for setting in self.settings]

    def text(self) -> str:
        """Return the sweep as a table, with what to know below it."""
        from rjax.runs.sweeps.telling import text

        return text(self)

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        content = {
            "format": 1,
            "axes": self.axes,
            "command": self.command,
            "seeds": self.seeds,
            "settings": [_json(setting) for setting in self.settings],
        }
        return json.dumps(plain(content), indent=1, allow_nan=False)

    def to_html(self) -> str:
        """Return the sweep as a page that needs nothing from elsewhere."""
        from rjax.runs.sweeps.page import page

        return page(self)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from rjax.runs.sweeps.page import fragment

        return fragment(self)

    def _row(self, setting: Setting) -> list[str]:
        values = [value for _, value in setting.choice.values] or ["as given"]
        count = f"{len(setting.runs)} of {len(setting.runs) + len(setting.failed)}"
        return [
            *values,
            count if setting.failed else f"{len(setting.runs)}",
            both(setting, "loss", lambda x: f"{x:.4f}"),
            both(setting, "accuracy", lambda x: f"{100 * x:.2f}"),
            both(setting, "skipped", lambda x: f"{x:.4g}"),
            both(setting, "images_per_second", lambda x: f"{x:,.0f}"),
            setting.bits or "-",
        ]


def both(setting: Setting, of: str, show: Callable[[float], str]) -> str:
    """Return a mean, and the spread if there is one."""
    if not setting.runs:
        return "-"
    spread = setting.spread(of)
    return show(setting.mean(of)) + (f" ± {show(spread)}" if spread == spread else "")


def _with_bits(settings: Sequence[Setting], seeds: int) -> list[Setting]:
    """Give every setting the letter of its class, and where it leaves the first."""
    letters: dict[tuple[str, ...], str] = {}
    found = []
    for setting in settings:
        bits = tuple(run.bits for run in setting.runs)
        letter = ""
        if len(bits) == seeds and all(bits):
            letter = letters.setdefault(bits, _letter(len(letters)))
        agrees = _agrees(settings[0], setting)
        found.append(dataclasses.replace(setting, bits=letter, agrees=agrees))
    return found


def _letter(place: int) -> str:
    high, low = divmod(place, 26)
    return (_letter(high - 1) if high else "") + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[low]


def _agrees(first: Setting, other: Setting) -> int | None:
    """Return after how many steps the masters of both were last the same."""
    if not first.runs or not other.runs or first.runs[0].seed != other.runs[0].seed:
        return None
    a, b = first.runs[0].masters, other.runs[0].masters
    equal = None
    for step in sorted(a.keys() & b.keys()):
        if a[step] != b[step]:
            break
        equal = step
    return equal


def _json(setting: Setting) -> dict[str, Any]:
    numbers = ("loss", "accuracy", "skipped", "images_per_second")
    return {
        "values": dict(setting.choice.values),
        "bits": setting.bits or None,
        "agrees_with_first_until": setting.agrees,
        "mean": {name: setting.mean(name) for name in numbers},
        "spread": {name: setting.spread(name) for name in numbers},
        "runs": [_run(run) for run in (*setting.runs, *setting.failed)],
    }


def _run(run: Seen) -> dict[str, Any]:
    names = ("seed", "folder", "error", "loss", "accuracy", "steps", "skipped", "scale")
    names += ("images_per_second", "bits", "versions", "device")
    return {name: getattr(run, name) for name in names}
