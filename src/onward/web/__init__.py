"""Training in the browser: a static site from artifacts, and a small server to look at it."""

from onward.web.serving import serve
from onward.web.site import write_site

__all__ = ["serve", "write_site"]
