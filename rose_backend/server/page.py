"""The page at ``/``, which shows what the engine does and has a chat: one static file, the same for everybody.

It needs no key, as it holds nothing: its script reads ``/metrics``, which needs none, and asks for a key to chat where
the server wants one. The policy that comes with it lets in that script and that style alone, and connections to this
server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()

_CONTENT = Path(__file__).with_name("page.html").read_bytes()


def _hash_of(tag: str) -> str:
    """Return what a policy calls the text of the only element with a tag."""
    (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), _CONTENT, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Another release has another page.
    "Cache-Control": "no-cache",
}


@router.get("/", include_in_schema=False)
async def _show_page() -> Response:
    return Response(_CONTENT, headers=_HEADERS, media_type="text/html")
