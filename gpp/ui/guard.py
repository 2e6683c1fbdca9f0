"""Who is answered: a browser that was given the key, at the address that was printed, and no page of another origin.

Run directories are their user's alone, so other users of the machine are not to read them over the loopback interface.
"""

from __future__ import annotations

import secrets
from http import HTTPStatus
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
"""A page loads nothing, asks this server alone, and stands in no frame; what it holds of files is escaped."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """An application behind a key.

    Args:
        hosts: what the Host header may be: a page of another name that leads to this address (DNS rebinding) is refused.
        key: the secret of the printed address, which the first page makes a cookie of.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], key: str) -> None:
        self._app, self._hosts, self._key = app, hosts, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            app = self._answered(Request(scope)) or self._app
            await app(scope, receive, guarded)
        else:
            await send({"type": "websocket.close"})

    def _answered(self, request: Request) -> Response | None:
        """The response that needs no application; None for a request that may pass."""
        host = request.headers.get("host", "")
        if host not in self._hosts:
            return _refused(HTTPStatus.MISDIRECTED_REQUEST, f"this is {' or '.join(sorted(self._hosts))}, and nothing else")
        cookie, rest = f"gpp-ui-{host.rpartition(':')[2]}", request.query_params.multi_items()
        given = request.query_params.get("key")
        if given is not None and request.method == "GET" and secrets.compare_digest(given.encode(), self._key.encode()):
            query = urlencode([(name, value) for name, value in rest if name != "key"])
            response = RedirectResponse(f"{request.url.path}{'?' * bool(query)}{query}", HTTPStatus.SEE_OTHER)
            response.set_cookie(cookie, self._key, httponly=True, samesite="strict")
            return response
        if not secrets.compare_digest(request.cookies.get(cookie, "").encode(), self._key.encode()):
            return _refused(HTTPStatus.FORBIDDEN, "open the address that gpp ui has printed, with its key")
        if request.method not in ("GET", "HEAD") and request.headers.get("origin") != f"http://{host}":
            return _refused(HTTPStatus.FORBIDDEN, "only a page of this server may ask for this")
        return None


def _refused(status: HTTPStatus, words: str) -> Response:
    return PlainTextResponse(f"{words}\n", status)
