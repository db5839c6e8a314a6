"""One suite per operation: each test that asks for an implementation runs for all of them."""

from __future__ import annotations

import pytest

from tests.support.implementations import INTERPRETER, ON_GPU, REFERENCE, Implementation


@pytest.fixture(params=[REFERENCE, INTERPRETER, ON_GPU], ids=str)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Return who computes: plain torch, the Triton kernels in the interpreter, and those on a GPU."""
    return request.param
