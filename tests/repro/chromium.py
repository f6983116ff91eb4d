"""Pages as a browser shows them, where there is one."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = "chromium", "chromium-browser", "google-chrome"
# Leaves in the page how wide it came out, and how tall its pictures are.
_MEASURE = (
    "<script>document.documentElement.dataset.seen=["
    "document.documentElement.scrollWidth-innerWidth,"
    "Math.min(...[...document.querySelectorAll('svg')].map(x=>x.clientHeight)),"
    "Math.min(...[...document.querySelectorAll('svg')].map(x=>x.clientWidth))"
    "].join()</script></body>"
)


def shown(page: str, folder: Path, width: int) -> tuple[int, int, int]:
    """Return what hangs over the right edge, and the smallest sides of pictures.

    Skips the test where no Chromium is installed, fails it if the page complains.
    """
    found = [path for name in _NAMES if (path := shutil.which(name))]
    if not found:
        pytest.skip("no Chromium is installed")
    file = folder / "page.html"
    file.write_text(page.replace("</body>", _MEASURE), encoding="utf-8")
    words = [
        found[0], "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom",
        "--enable-logging=stderr", "--virtual-time-budget=2000",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
        file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    seen = re.search(r'data-seen="(-?\d+),(\d+),(\d+)"', done.stdout)
    assert seen is not None, done.stdout[:500]
    over, tall, wide = map(int, seen.groups())
    return over, tall, wide
