"""Fixtures that put one attention layer of the backend under test on this machine's device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeHost = Callable[..., Any]

# Variants of a backend that are run separately: ROSE can leave the K/V write to a separate launch.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "ROSE": {
        "stores K/V itself": {"rose": {}},
        "separate K/V write": {"rose": {"fused_kv_append": False}},
    }
}
# vLLM's configuration wants a model; its layers are never built.
MODEL = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_positions": 1024,
    "n_embd": 64,
    "n_head": 1,
    "n_layer": 1,
    "vocab_size": 512,
}


def backend_name(config: pytest.Config) -> str:
    """Return the backend under test; without the option, and in runs of all tests, it is Rose's."""
    return str(config.getoption("conformance_attention_backend", None) or "ROSE")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat scenes for each variant of the backend."""
    variants = VARIANTS.get(backend_name(metafunc.config))
    if variants and "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", variants.values(), ids=variants.keys())


@pytest.fixture
def variant() -> dict[str, Any]:
    """Return vLLM's ``additional_config``."""
    return {}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model's configuration and nothing else."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Any:
    """Return the backend's class."""
    from rose_backend.conformance.attention.host import find_backend

    return find_backend(backend_name(request.config)).get_class()


@pytest.fixture
def make_host(
    request: pytest.FixtureRequest, backend: Any, variant: dict[str, Any], model_path: Path
) -> MakeHost:
    """Return a function that builds a ``Host`` for a case, or skips what the backend says that it does not support."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    from rose_backend.conformance.attention.batch import parse_batch
    from rose_backend.conformance.attention.differences import difference
    from rose_backend.conformance.attention.host import MAX_MODEL_LEN, Host, find_backend, refusals

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = find_backend(backend_name(request.config)).name

    def make(case: Any, *batches: str, extra_rows: int = 0, extra_tokens: int = 0, **options: Any) -> Host:
        if reasons := refusals(backend, case):
            pytest.skip(f"{name} says: {', '.join(reasons)}")
        if known := difference(name, case, request.node.originalname):
            request.node.add_marker(pytest.mark.xfail(reason=known, strict=True))
        block_size = case.block_size or backend.get_preferred_block_size(16)
        arguments: dict[str, Any] = {
            "model": str(model_path),
            "skip_tokenizer_init": True,
            "attention_backend": name,
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
        host = Host(
            backend,
            case,
            EngineArgs(**arguments).create_engine_config(),
            device,
            max_rows=max(map(len, all_rows)) + extra_rows,
            max_tokens=max(sum(row.query_len for row in rows) for rows in all_rows) + extra_tokens,
            num_blocks=num_blocks + 4,
            **options,
        )
        host.has_own_order |= request.config.getoption("conformance_own_block_order", False)
        return host

    return make
