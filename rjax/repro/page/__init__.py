"""Pages that need nothing from elsewhere, and that of a comparison."""

from rjax.repro.page.comparison import fragment, page

__all__ = ["fragment", "page"]
