"""Real vLLM configurations of the embedded model, made in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.vllm_plugin.configs import LoadModel, MakeConfig, OnGpu

# The package's other half works and is tested without vLLM.
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def make_config(tiny_model_path: Path) -> MakeConfig:
    """Return a function that builds a finished ``VllmConfig`` from engine arguments, ROSE unless told otherwise."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        # A vLLM for GPUs on a machine without one: enough for configurations and schedulers.
        current_platform.device_type = "cpu"
        current_platform.support_hybrid_kv_cache = lambda: True

    def make(**arguments: Any) -> Any:
        defaults: dict[str, Any] = {
            "model": str(tiny_model_path),
            "attention_backend": "rose",
            "dtype": "float32",
            "max_model_len": 1024,
            "enforce_eager": True,
        }
        return EngineArgs(**{**defaults, **arguments}).create_engine_config()

    # vLLM sets up its logging with the first configuration, and drops handlers that were added before.
    make()
    return make


@pytest.fixture
def rose_log(make_config: MakeConfig) -> Iterator[list[str]]:
    """Return what the plugin logs during the test, one entry per line. vLLM's loggers do not propagate to pytest's."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    from rose_backend.vllm_plugin.plugin_logger import log_once

    # The same line is logged once per process; each test wants to see its own.
    log_once.cache_clear()
    logger, handler = logging.getLogger("vllm.rose_backend"), Collector()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return counters that start with this test."""
    from rose_backend.vllm_plugin.plugin_logger import sample_counts

    fresh = sample_counts()
    monkeypatch.setattr("rose_backend.vllm_plugin.sampler.SAMPLES", fresh)
    return fresh


@pytest.fixture
def on_gpu(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    """Return a function that builds a configuration with what vLLM would choose on a GPU."""
    from vllm.config import CUDAGraphMode, VllmConfig

    from tests.support.vllm_plugin.configs import VLLM_SIZES

    def make(sizes: list[int] = VLLM_SIZES, **options: Any) -> Any:
        config = make_config(**options)
        compilation = config.compilation_config
        compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = list(sizes), sizes[-1]
        # Not before: the configuration was made for the platform that is there.
        monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
        return config

    return make


@pytest.fixture
def load_model(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoadModel]:
    """Return a function that loads a model with Rose's layers as vLLM's workers do."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.model_loader import get_model

    from rose_backend.vllm_plugin.models.decoder import RoseDecoder

    # No kernels are compiled in other processes.
    monkeypatch.setattr("rose_backend.vllm_plugin.attention.backend.begin_to_compile", lambda *_: None)
    monkeypatch.setattr("rose_backend.vllm_plugin.models.decoder.wait_for_kernels", lambda *_: None)
    backend = "nccl" if torch.cuda.is_available() else "gloo"

    def load(path: Path, **options: Any) -> RoseDecoder:
        options |= {"additional_config": {"rose": {"max_quantized_rows": 64}}}
        config = make_config(**{"model": str(path), "dtype": "bfloat16", "enforce_eager": False, **options})
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{tmp_path}/ranks", 0, backend)
            initialize_model_parallel(1, 1)
            model = get_model(vllm_config=config)
        assert isinstance(model, RoseDecoder)
        return model

    yield load
    cleanup_dist_env_and_memory()
