"""GET of a URL of which a store or a broker said that a fragment is there, and nowhere else."""

from __future__ import annotations

import http.client
import urllib.request
from typing import cast

__all__ = ["open_without_redirects"]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that lets a redirect be an error."""

    def redirect_request(self, *_: object) -> None:
        """Return no request to follow a redirect with."""


_opener = urllib.request.build_opener(_NoRedirects)


def open_without_redirects(
    request: urllib.request.Request | str, timeout_s: float
) -> http.client.HTTPResponse:
    """Return the answer to a GET. It blocks.

    A redirect is not followed: whoever answers at the URL could send this process to any address
    in its network.

    Args:
        request: request or URL, of the scheme ``http`` or ``https``.
        timeout_s: longest time without data.

    Raises:
        urllib.error.HTTPError: the status is no success; a redirect is none.
        OSError: the host cannot be reached.
        http.client.HTTPException: the answer is malformed.
    """
    return cast("http.client.HTTPResponse", _opener.open(request, timeout=timeout_s))
