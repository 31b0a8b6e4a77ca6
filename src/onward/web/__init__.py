"""Training in the browser: a static site from artifacts, and a local server for it."""

from onward.web.serving import serve
from onward.web.site import write_site

__all__ = ["serve", "write_site"]
