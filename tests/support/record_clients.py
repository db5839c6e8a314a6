"""Writes down what langchain and litellm send, where they are installed.

``python -m tests.support.record_clients URL MODEL FILE`` makes their calls at a server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.client_calls import langchain_calls, litellm_calls
from tests.support.recording_proxy import recording_proxy


def main(url: str, model: str, file: str) -> None:
    """Make the calls at the server at ``url``, and write the bodies of the requests to ``file``."""
    recorded = {}
    with recording_proxy(url) as proxy:
        for call in (*langchain_calls(), *litellm_calls()):
            call.outcome(proxy.url, model)
            recorded[call.name] = [
                {"path": exchange.path, "content": exchange.content.decode()} for exchange in proxy.take()
            ]
    Path(file).write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
