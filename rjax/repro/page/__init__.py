"""Pages that need nothing from elsewhere: of a comparison, of a sweep."""

from rjax.repro.page.comparison import fragment, page

__all__ = ["fragment", "page"]
