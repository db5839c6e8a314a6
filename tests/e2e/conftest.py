"""vLLM engines inside the test process: real scheduler, worker and model, about two seconds each."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_checkpoint import write_random_gpt2_124m

collect_ignore_glob = [] if find_spec("vllm") else ["test_vllm_*.py"]

MakeEngine = Callable[..., contextlib.AbstractContextManager[Any]]

# The cache's size is given: vLLM would measure what is free, and fails where other processes come and go meanwhile.
GPU_MEMORY: dict[str, Any] = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30}


@pytest.fixture(scope="session")
def make_engine(tiny_model_path: Path) -> Iterator[MakeEngine]:
    """Return a context manager that runs a ``vllm.LLM`` with ROSE in this process, by model runner "V1" or "V2"."""
    import torch
    from vllm import LLM
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    set_num_threads = torch.set_num_threads
    # An engine's start and end collect garbage nine times, each half a second if all imported modules are looked at.
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # Thread binding would stay behind in the test process.
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not torch.cuda.is_available():
            # vLLM looks at each kind of model in a process of its own, to leave CUDA alone; it imports all of vLLM.
            environment.setattr(registry, "_run_in_subprocess", lambda look: look())

        @contextlib.contextmanager
        def engine(*, num_threads: int = 1, runner: str | None = None, **options: Any) -> Iterator[Any]:
            # Tests look at single tokens, unless told otherwise.
            rose = {
                "exact_cached_tokens": True,
                **options.get("additional_config", {}).get("rose", {}),
            }
            options["additional_config"] = {"rose": rose}
            defaults: dict[str, Any] = {
                "model": str(tiny_model_path),
                "attention_backend": "rose",
                "dtype": "float32",
                "max_model_len": 1024,
                "enforce_eager": True,
                "block_size": 16,
                "max_num_seqs": 64,
                # 26,000 tokens of the embedded model; a whole GiB takes more than a second to fill with zeros.
                "kv_cache_memory_bytes": 128 << 20,
            }
            if torch.cuda.is_available():
                # An engine of the same test module, or another session, may hold the rest of the GPU.
                defaults["gpu_memory_utilization"] = GPU_MEMORY["gpu_memory_utilization"]
            # A small model's operations take less time than waking a second thread on a busy machine.
            threads_before = torch.get_num_threads()
            torch.set_num_threads(num_threads)
            with pytest.MonkeyPatch.context() as patch:
                # It takes precedence over the option above.
                patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
                if runner is not None:
                    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "V2")))
                # vLLM would freeze an engine's own objects, too, and unfreeze everything wherever it cleans up.
                patch.setattr(gc, "freeze", lambda: None)
                patch.setattr(gc, "unfreeze", lambda: None)
                # The engine before was held by its test until now; vLLM measures free memory while it starts.
                cleanup_dist_env_and_memory()
                # An n-gram drafter has loaded numba, and vLLM's CPU platform looks at every attribute of every module:
                # one of llvmlite's has an answer to any name, and vLLM stumbles over it.
                sys.modules.pop("llvmlite.binding.ffi", None)
                # Model runner V1 forbids captures for the rest of the process; V2 does not allow them again.
                set_cudagraph_capturing_enabled(True)
                llm = LLM(**{**defaults, **options})
                try:
                    yield llm
                finally:
                    # vLLM's worker puts a function that does nothing in its place, and its n-gram drafter's numba sets
                    # two threads for all of OpenMP: small models of later tests would take ten times as long.
                    torch.set_num_threads = set_num_threads
                    torch.set_num_threads(threads_before)
                    llm.llm_engine.engine_core.shutdown()
                    del llm
                    cleanup_dist_env_and_memory()

        yield engine
    gc.unfreeze()


@pytest.fixture(scope="session")
def gpt2_124m_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a randomly initialised GPT-2 of 124M parameters."""
    return write_random_gpt2_124m(tmp_path_factory.mktemp("gpt2_124m"))


@pytest.fixture
def steps_in_python(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the metadata of every call of ROSE's attention that is made now, rather than replayed from a graph."""
    from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl

    calls: list[Any] = []
    forward = RoseAttentionImpl.forward

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args[5] if len(args) > 5 else kwargs["attn_metadata"])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(RoseAttentionImpl, "forward", record)
    return calls


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the metadata of each step in which Rose's layers may let attention rotate and overlap."""
    from rose_backend.vllm_plugin.attention.backend import RoseAttentionImpl

    made: list[Any] = []
    plan = RoseAttentionImpl.plan_decode

    def record(self: Any, layer: Any, kv_cache: Any, attn_metadata: Any) -> None:
        made.append(attn_metadata)
        plan(self, layer, kv_cache, attn_metadata)

    monkeypatch.setattr(RoseAttentionImpl, "plan_decode", record)
    return made


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pack layers as on a GPU; return what is noted of products that sum up the moments for the next one."""
    from rose_backend.vllm_plugin.models import decoder
    from tests.support.moments import record_moments

    monkeypatch.setattr(decoder, "packs_layers", lambda switches, device: True)
    return record_moments(monkeypatch)
