"""``--backend NAME`` chooses what the suite runs; fixtures put one attention layer of it on this machine's device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Without vLLM nothing but the grammar can be imported.
collect_ignore_glob = [] if find_spec("vllm") else ["test_[!b]*.py"]

MakeHost = Callable[..., Any]

# What else of a backend is worth a run of its own: ROSE can leave the K/V write to a separate launch.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "ROSE": {
        "stores K/V itself": {"rose": {}},
        "separate K/V write": {"rose": {"fused_kv_append": False}},
    }
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's option; without it, and in runs of all tests, ROSE is the backend."""
    parser.addoption(
        "--backend", default="ROSE", help="vLLM attention backend under test: ROSE, FLASH_ATTN, ..."
    )


def backend_name(config: pytest.Config) -> str:
    """Return the backend under test; runs that started elsewhere have no such option."""
    return str(config.getoption("--backend", default="ROSE"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat tests for each variant of the backend."""
    if "variant" in metafunc.fixturenames:
        variants = VARIANTS.get(backend_name(metafunc.config), {"": {}})
        metafunc.parametrize("variant", variants.values(), ids=variants.keys())


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Any:
    """Return the backend's class."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rose_backend.vllm_plugin import register

    register()
    name = backend_name(request.config)
    if name not in AttentionBackendEnum.__members__:
        raise pytest.UsageError(
            f"--backend: got {name!r}, vLLM knows {', '.join(AttentionBackendEnum.__members__)}"
        )
    return AttentionBackendEnum[name].get_class()


@pytest.fixture
def make_host(
    request: pytest.FixtureRequest, backend: Any, variant: dict[str, Any], tiny_model_path: Path
) -> MakeHost:
    """Return a function that builds a ``Host`` for a case, or skips what the backend says that it does not support."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    from tests.conformance.attention.batch import parse_batch
    from tests.conformance.attention.differences import difference
    from tests.conformance.attention.host import MAX_MODEL_LEN, Host, refusals

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make(case: Any, *batches: str, extra_rows: int = 0, extra_tokens: int = 0, **options: Any) -> Host:
        if reasons := refusals(backend, case):
            pytest.skip(f"{backend.get_name()} says: {', '.join(reasons)}")
        if known := difference(backend.get_name(), case, request.node.originalname):
            request.node.add_marker(pytest.mark.xfail(reason=known, strict=True))
        block_size = case.block_size or backend.get_preferred_block_size(16)
        arguments: dict[str, Any] = {
            "model": str(tiny_model_path),
            "attention_backend": backend.get_name(),
            "dtype": str(case.dtype).removeprefix("torch."),
            "kv_cache_dtype": case.cache_dtype,
            "block_size": block_size,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 256,
            "additional_config": variant,
        }
        if case.num_speculative_tokens:
            arguments["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": case.num_speculative_tokens,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 2,
            }
        all_rows = [parse_batch(batch) for batch in batches]
        num_blocks = max(sum(-(-row.seq_len // block_size) for row in rows) for rows in all_rows)
        return Host(
            backend,
            case,
            EngineArgs(**arguments).create_engine_config(),
            device,
            max_rows=max(map(len, all_rows)) + extra_rows,
            max_tokens=max(sum(row.query_len for row in rows) for rows in all_rows) + extra_tokens,
            num_blocks=num_blocks + 4,
            **options,
        )

    return make
