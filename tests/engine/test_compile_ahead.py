"""The kernels of a start are found without a GPU, from config.json alone, and ``rose warmup`` compiles them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from triton.tools.tensor_descriptor import TensorDescriptor

from rose_backend.cli import main
from rose_backend.compile_ahead import pool as compilation_pool
from rose_backend.compile_ahead.pool import AheadCompilation, CompiledKernel
from rose_backend.compile_ahead.recorded_launches import KernelSource, RecordedLaunches, record_launches
from rose_backend.config import EngineConfig
from rose_backend.engine import gpu_startup as start_kernels
from rose_backend.engine.gpu_startup import compile_starts, launch_everything, record_start, warm_cache
from rose_backend.errors import ConfigError, ModelError
from rose_backend.kernels.gpu_properties import GpuProperties
from rose_backend.kernels.linear import small_batch_linear
from rose_backend.kernels.sampling.ops import SAMPLER_KERNELS
from rose_backend.kernels.tuning.choices import LinearConfig, choose_linear_config

H100 = GpuProperties((9, 0), 132)
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
}
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3}
EXPERTS = {"_add_experts_kernel", "_choose_experts_kernel", "_expert_product_kernel"}
ALWAYS = {
    "_advance_rows_kernel",
    "_bitmask_kernel",
    "_block_clone_kernel",
    "_choose_kernel",
    "_embed_tokens_kernel",
    "_mask_kernel",
    "_norm_kernel",
    "_paged_decode_kernel",
    "_paged_prefill_kernel",
    "_report_kernel",
    "_scan_kernel",
    "_summarize_kernel",
    "small_batch_linear_kernel",
}


@pytest.fixture
def qwen3_path(tmp_path: Path) -> Path:
    path = tmp_path / "qwen3"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN3))
    return path


def record(path: Path, **options: Any) -> Counter[str]:
    config = EngineConfig(model=str(path), **{"max_num_batched_tokens": 8192, **options})
    return Counter(source.name for source in record_start(path, config, H100))


def test_a_start_is_recorded_from_config_alone(qwen3_path: Path, tiny_model_path: Path) -> None:
    qwen3 = record(qwen3_path)
    # So many rows of 8 KV heads that not all begin at once; the tiny model has 2.
    assert set(qwen3) == ALWAYS | {"_rotate_kernel", "_silu_mul_kernel", "_longest_first_kernel"}
    gpt2 = record(tiny_model_path)
    assert set(gpt2) == ALWAYS
    # Kernels that only captured graphs launch, and one for each size of a batch.
    assert gpt2["_advance_rows_kernel"] > 5 and gpt2["small_batch_linear_kernel"] > 5


def test_a_start_with_drafts_has_kernels_for_them(qwen3_path: Path) -> None:
    drafts = {"_look_up_kernel", "_draft_kernel", "_accept_kernel"}
    recorded = record(qwen3_path, max_num_seqs=64, speculative_config=N_GRAMS)
    assert set(recorded) == (ALWAYS - {"_advance_rows_kernel"}) | drafts | {
        "_rotate_kernel",
        "_silu_mul_kernel",
    }
    assert recorded["_paged_decode_kernel"] > record(qwen3_path, max_num_seqs=64)["_paged_decode_kernel"]
    # Other drafts than these are looked up by the same kernel.
    assert recorded["_look_up_kernel"] == 1


def test_a_head_is_a_part_of_a_start(qwen3_path: Path, tmp_path: Path) -> None:
    drafts = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2}
    config = EngineConfig(model=str(qwen3_path), max_num_batched_tokens=64, speculative_config=drafts)
    with pytest.raises(ModelError, match=r"^speculative_config.model: .* has no config.json"):
        compile_starts(qwen3_path, [config], H100)
    fields = QWEN3 | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": [0, 2],
        "draft_vocab_size": 600,
    }
    keys = []
    for theta in (10_000.0, 20_000.0):
        (tmp_path / "config.json").write_text(json.dumps(fields | {"rope_theta": theta}))
        keys.append(start_kernels._key(qwen3_path, config))
    assert keys[0] != keys[1]
    recorded = record(qwen3_path, max_num_seqs=64, speculative_config=drafts)
    assert {"_write_kv_kernel", "_accept_kernel"} <= set(recorded)
    assert not {"_look_up_kernel", "_draft_kernel"} & set(recorded)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": 999}))
    with pytest.raises(ModelError, match=r"^speculative_config.model: .*vocab_size is 999, with this model"):
        record_start(qwen3_path, config, H100)


def test_experts_of_all_batches_are_a_few_kernels(qwen3_path: Path) -> None:
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048}
    moe = QWEN3 | sizes | {"architectures": ["Qwen3MoeForCausalLM"]}
    (qwen3_path / "config.json").write_text(json.dumps(moe))
    recorded = record(qwen3_path)
    assert set(recorded) == ALWAYS | EXPERTS | {"_rotate_kernel", "_longest_first_kernel"}
    # Products with and without the norm in front, and of several sizes of tiles.
    assert recorded["_choose_experts_kernel"] == 1 and recorded["_expert_product_kernel"] <= 16


@pytest.mark.parametrize(
    ("options", "more", "less"),
    [
        ({"cuda_graph": False}, set(), set()),
        ({"fused_sampler": False}, set(), {"_choose_kernel", "_scan_kernel"}),
        (
            {"fused_mlp": False, "fused_add_layernorm": False},
            set(),
            {"small_batch_linear_kernel"},
        ),
        ({"fused_kv_append": False}, {"_write_kv_kernel"}, {"small_batch_linear_kernel"}),
    ],
    # The order of a set differs from process to process, and all have to collect the same tests.
    ids=["no graphs", "no sampler", "no small batches", "separate write"],
)
def test_switches_decide(
    tiny_model_path: Path, options: dict[str, bool], more: set[str], less: set[str]
) -> None:
    assert set(record(tiny_model_path, **options)) == (ALWAYS | more) - less


@pytest.mark.parametrize(("hidden_size", "largest"), [(1024, 256), (2048, 128), (4096, 128)])
def test_the_library_multiplies_for_more_decodes_of_a_wide_model(
    qwen3_path: Path, monkeypatch: pytest.MonkeyPatch, hidden_size: int, largest: int
) -> None:
    (qwen3_path / "config.json").write_text(json.dumps(QWEN3 | {"hidden_size": hidden_size}))
    config = EngineConfig(model=str(qwen3_path), max_num_batched_tokens=8192, max_num_seqs=256)
    rows = []

    def choose(num_rows: int, *sizes: int, **options: bool) -> LinearConfig:
        rows.append(num_rows)
        return choose_linear_config(num_rows, *sizes, **options)

    monkeypatch.setattr(small_batch_linear, "choose_linear_config", choose)
    record_start(qwen3_path, config, H100)
    assert max(rows) == largest


def test_products_copy_whole_tiles_of_rows(qwen3_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (qwen3_path / "config.json").write_text(
        json.dumps(QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072})
    )
    copied = []

    class NotedDescriptor(TensorDescriptor):
        def __post_init__(self) -> None:
            copied.append((self.shape[0], self.block_shape[0]))

    # Of x; that of the weight is made by TensorDescriptor.from_tensor.
    monkeypatch.setattr(small_batch_linear, "TensorDescriptor", NotedDescriptor)
    config = EngineConfig(model=str(qwen3_path), max_num_batched_tokens=8192, max_num_seqs=256)
    record_start(qwen3_path, config, H100)
    assert {tile for _, tile in copied} >= {32, 64, 128}
    assert not [(rows, tile) for rows, tile in copied if rows % tile]


def test_weights_or_their_type_in_config_make_no_difference(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model_path / "config.json").read_text())
    config = EngineConfig(model="m", max_num_batched_tokens=2048)
    with_weights, without = (record_start(path, config, H100) for path in (tiny_model_path, tmp_path))
    assert with_weights == without
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "dtype": "float99"}))
    with pytest.raises(ModelError, match=r"config\.json: dtype must be the name of a type, got 'float99'"):
        record_start(tmp_path, config, H100)


def test_kernels_do_not_depend_on_the_number_of_blocks(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=2048, max_num_seqs=8)
    few = record_start(tiny_model_path, config, H100)
    monkeypatch.setattr(start_kernels, "_NUM_BLOCKS", 77_777)
    assert record_start(tiny_model_path, config, H100) == few


@pytest.mark.parametrize("options", [{}, {"speculative_config": N_GRAMS}], ids=["plain", "drafts"])
def test_recording_is_quick_to_import(qwen3_path: Path, options: dict[str, Any]) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.engine.test_compile_ahead import record; "
        f"record(Path({str(qwen3_path)!r}), **{options!r}); assert not {{'torch._dynamo', 'sympy'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Pool:
    """Stands for the processes: 'compiles' at once."""

    failure: str | None = None
    error: str | None = None

    def __init__(self, num_processes: int | None) -> None:
        self.sources: list[KernelSource] = []

    def submit(self, sources: list[KernelSource]) -> None:
        self.sources = sources

    def finished(self) -> list[CompiledKernel]:
        return [CompiledKernel(source, self.error, folder=".") for source in self.sources]

    def close(self) -> None:
        pass


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Pool]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(compilation_pool, "CompilationPool", Pool)
    return Pool


def test_a_second_start_looks_for_nothing(tiny_model_path: Path, pool: type[Pool]) -> None:
    configs = [EngineConfig(model="m", max_num_batched_tokens=2048, max_num_seqs=2)]
    first = compile_starts(tiny_model_path, configs, H100)
    assert first.wait() is None and first.kernels
    second = compile_starts(tiny_model_path, configs, H100)
    assert second.is_over and second.wait() is None
    for gpu, options in ((GpuProperties((9, 0), 78), {}), (H100, {"fused_mlp": False})):
        changed = EngineConfig(model="m", max_num_batched_tokens=2048, max_num_seqs=2, **options)
        assert not compile_starts(tiny_model_path, [changed], gpu).is_over


def test_a_forward_pass_does_not_wait_for_the_sampler(
    tiny_model_path: Path, pool: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_sampler(self: Pool) -> list[CompiledKernel]:
        return sorted(finished(self), key=lambda kernel: kernel.source.name in SAMPLER_KERNELS)

    finished = pool.finished
    monkeypatch.setattr(pool, "finished", last_sampler)
    config = EngineConfig(model="m", max_num_batched_tokens=2048, max_num_seqs=2)
    compilation = compile_starts(tiny_model_path, [config], H100)
    compilation.wait_for_others(*SAMPLER_KERNELS)
    names = [kernel.source.name for kernel in compilation.kernels]
    assert names and not set(names) & set(SAMPLER_KERNELS) and not compilation.is_over
    compilation.wait_for_others(*SAMPLER_KERNELS)
    assert len(compilation.kernels) == len(names)
    assert compilation.wait() is None
    left = {kernel.source.name for kernel in compilation.kernels[len(names) :]}
    assert left == set(SAMPLER_KERNELS)


def test_the_sampler_is_launched_last(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def launch(*args: Any) -> None:
        launch_everything(*args, before_draws=lambda: launched.extend(each.name for each in recorded.sources))

    @contextmanager
    def record(gpu: GpuProperties) -> Iterator[RecordedLaunches]:
        nonlocal recorded
        with record_launches(gpu) as recorded:
            yield recorded

    recorded: RecordedLaunches
    monkeypatch.setattr(start_kernels, "launch_everything", launch)
    monkeypatch.setattr(start_kernels, "record_launches", record)
    config = EngineConfig(model="m", max_num_batched_tokens=2048, max_num_seqs=2)
    everything = [source.name for source in record_start(tiny_model_path, config, H100)]
    assert set(SAMPLER_KERNELS) < set(everything) and not set(SAMPLER_KERNELS) & set(launched)
    assert "_paged_decode_kernel" in launched


def test_failures_are_reported_and_not_noted(
    tiny_model_path: Path, pool: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [EngineConfig(model="m", max_num_batched_tokens=2048, max_num_seqs=2)]
    monkeypatch.setattr(pool, "error", "CompilationError: no")
    failure = compile_starts(tiny_model_path, configs, H100).wait()
    assert failure is not None and "failed, the first is _" in failure and failure.endswith("nError: no")
    monkeypatch.setattr(pool, "error", None)
    monkeypatch.setattr(pool, "failure", "a process ended")
    assert compile_starts(tiny_model_path, configs, H100).wait() == "a process ended"
    assert not compile_starts(tiny_model_path, configs, H100).is_over


@pytest.mark.parametrize(
    "wait",
    [lambda each: each.wait_for_others(*SAMPLER_KERNELS), AheadCompilation.wait],
    ids=["forward", "all"],
)
def test_a_cache_that_cannot_be_written_is_an_error(
    tiny_model_path: Path,
    pool: type[Pool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wait: Callable[[AheadCompilation], Any],
) -> None:
    configs = [EngineConfig(model="m", max_num_batched_tokens=2048, max_num_seqs=2)]
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(pool, "error", "NotADirectoryError")
    with pytest.raises(ConfigError, match="TRITON_CACHE_DIR"):
        wait(compile_starts(tiny_model_path, configs, H100))


def test_warmup_notes_starts_online_and_offline(
    qwen3_path: Path, pool: type[Pool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warmup", str(qwen3_path), "--compute-capability", "9.0", "--max-num-seqs", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"compiling kernels for {qwen3_path}, ") and "takes minutes" in out.splitlines()[0]
    assert "0 there before" in out and "cache: " in out
    assert logging.getLogger("rose_backend.engine.progress").isEnabledFor(logging.INFO), (
        "stderr is no terminal"
    )
    for budget in (2048, 8192, 16_384):
        config = EngineConfig(model="m", max_num_batched_tokens=budget, max_num_seqs=2)
        assert compile_starts(qwen3_path, [config], H100).is_over


def test_warmup_of_a_hugging_face_id_downloads_no_weights(
    qwen3_path: Path, pool: type[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        assert (name, allow_patterns) == ("someone/tiny", ["config.json"])
        return str(qwen3_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert main(["warmup", "someone/tiny", "--compute-capability", "9.0", "--max-num-seqs", "2"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "compute_capability: there is no GPU here to compile for; name one"),
        (
            ["--compute-capability", "9.0", "--max-model-len", "99999"],
            "max_model_len: got 99999, allowed are at most",
        ),
        (["--compute-capability", "nine"], "compute_capability: got 'nine', allowed are numbers such as"),
        (["--compute-capability", "7.5"], "compute_capability: got 7.5, allowed are 8.0 and later"),
        (["--compute-capability", "12.0"], "multiprocessors: needed for other compute capabilities than"),
        (["--multiprocessors", "9"], "multiprocessors: allowed with --compute-capability only"),
        (
            ["--compute-capability", "9.0", "--multiprocessors", "0"],
            "multiprocessors: got 0, allowed is an integer from 1 to",
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    qwen3_path: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(start_kernels.torch.cuda, "is_available", lambda: False)
    assert main(["warmup", str(qwen3_path), *options]) == 2
    assert capsys.readouterr().err.startswith(f"rose: error: {message}")


def test_nothing_is_compiled_for_the_interpreter(
    qwen3_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["warmup", str(qwen3_path), "--compute-capability", "9.0"]) == 2
    assert capsys.readouterr().err.startswith("rose: error: TRITON_INTERPRET: got 1")


def test_warm_cache_really_compiles(
    qwen3_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    sources: list[KernelSource] = []

    def two(*args: Any) -> list[KernelSource]:
        sources[:] = [source for source in record_start(*args) if source.name.startswith(("_emb", "_norm"))]
        return sources

    monkeypatch.setattr(start_kernels, "record_start", two)
    config = EngineConfig(model=str(qwen3_path), max_num_batched_tokens=2048, max_num_seqs=2)
    kernels, failure = warm_cache(config, (9, 0), None)
    assert failure is None and len(kernels) == len(sources) > 1
    assert all((tmp_path / "cache" / kernel.folder).is_dir() for kernel in kernels)


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("model", "capability", "num_processors", "shared_bytes"),
    [(QWEN3, (10, 0), None, 227 << 10), (QWEN3 | LLAMA_8B, (12, 0), 170, 99 << 10)],
    ids=["Qwen3 0.6B on a B200", "Llama 3.1 8B on an RTX 5090"],
)
def test_all_products_and_decodes_of_a_start_fit_gpus_that_are_not_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    capability: tuple[int, int],
    num_processors: int | None,
    shared_bytes: int,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def record_some(*args: Any) -> list[KernelSource]:
        return [
            source
            for source in record_start(*args)
            if source.name.endswith(("_linear_kernel", "_decode_kernel"))
        ]

    monkeypatch.setattr(start_kernels, "record_start", record_some)
    config = EngineConfig(model=str(tmp_path), max_num_batched_tokens=2048)
    kernels, failure = warm_cache(config, capability, num_processors)
    assert failure is None and len(kernels) > 20
    for kernel in kernels:
        files = (tmp_path / "cache" / kernel.folder).glob("*.json")
        (facts,) = (json.loads(path.read_text()) for path in files if not path.name.startswith("__grp__"))
        assert facts["shared"] <= shared_bytes, facts["name"]
