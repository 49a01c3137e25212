"""The page at ``GET /``: static files without a build step, and the headers that they are served with.

``/`` is ``index.html``; the files that it loads are at ``/page/NAME``. The page uses the endpoints of its own origin:

- ``/v1/models``: the name of the model, and in ``selfspec.methods`` of its entry the names of methods. The default is
  ``selfspec.method``, or else the first.
- ``/v1/chat/completions`` as a stream with ``speculative: {"method", "enabled", "report": true}``. The page colours
  tokens by ``selfspec.tokens`` of each chunk. It shows the figures (``acceptance_rate``, ``tokens_per_second``,
  ``speedup_estimate``) of the last chunk that has them, so they may come while the answer is being generated.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers for every file: nothing but the page's own files and its own origin, no inline script or style."""


class PageFile(NamedTuple):
    """The bytes of a file of the page, and the value of ``Content-Type``."""

    content: bytes
    media_type: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """The files of the page by name, ``index.html`` among them; no other name is to be served."""
    found = {}
    for file in files(__name__).iterdir():
        media_type = _MEDIA_TYPES.get("." + file.name.rpartition(".")[2])
        if media_type is not None:
            found[file.name] = PageFile(file.read_bytes(), media_type)
    return found
