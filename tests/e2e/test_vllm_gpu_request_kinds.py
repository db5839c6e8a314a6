"""On CUDA, with both model runners: what a request may ask for, as ``test_vllm_request_kinds`` checks it on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import GPU_MEMORY, MakeEngine
from tests.e2e.test_vllm_request_kinds import *  # noqa: F403 - its tests, with the engine below
from tests.e2e.test_vllm_request_kinds import ENGINE_OPTIONS
from tests.support.stepped_engine import SteppedEngine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["V2", "V1"])
def shared_engine(request: pytest.FixtureRequest, make_engine: MakeEngine) -> Iterator[SteppedEngine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(request.param == "V2")))
        with make_engine(**ENGINE_OPTIONS, **GPU_MEMORY) as llm:
            yield SteppedEngine(llm)
