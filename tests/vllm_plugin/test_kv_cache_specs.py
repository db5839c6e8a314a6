"""Layers with sliding windows under Rose's block manager: what vLLM is told of their K/V, and the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from rose_backend.block_manager import GroupType
from rose_backend.vllm_plugin.attention.backend import RoseAttentionBackend
from rose_backend.vllm_plugin.kv_cache.groups import RoseGroups, block_bytes
from rose_backend.vllm_plugin.kv_cache.spec import RoseAttentionSpec, is_rose_group
from rose_backend.vllm_plugin.plugin_logger import log_once
from tests.support.vllm_plugin.configs import MakeConfig, n_grams, rose

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups


BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, WINDOW = 16, 2, 64, 40
HANDED_BACK = rose(block_manager=False)
TOKEN_BYTES = 2 * NUM_HEADS * HEAD_SIZE * 4

MakeLayers = Callable[..., Any]


class OtherBackend(RoseAttentionBackend):
    """Stands for one of vLLM's, on any platform."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM takes no name that it does not know

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec


@pytest.fixture
def make_layers(make_config: MakeConfig) -> MakeLayers:
    """Return a function that makes a configuration with vLLM's own layers, one for each window given."""
    log_once.cache_clear()

    def make(
        *windows: int | None, layer_options: dict[int, dict[str, Any]] | None = None, **options: Any
    ) -> Any:
        config = make_config(block_size=BLOCK_SIZE, **options)
        config.cache_config.kv_cache_layout = "LBHNC"  # as the engine core resolves it
        with set_current_vllm_config(config), torch.device("cpu"):
            for index, window in enumerate(windows):
                given = {"num_heads": NUM_HEADS, "head_size": HEAD_SIZE, "scale": 0.1}
                given |= {"attn_backend": RoseAttentionBackend, **(layer_options or {}).get(index, {})}
                Attention(
                    **given,
                    cache_config=config.cache_config,
                    prefix=f"layers.{index}.attn",
                    per_layer_sliding_window=window,
                )
        return config

    return make


@pytest.mark.parametrize(
    "windows", [(WINDOW,) * 3, (WINDOW, WINDOW, None), (None, 128, WINDOW)], ids=["all", "mixed", "two sizes"]
)
def test_all_layers_are_one_group_of_whole_kv(
    make_layers: MakeLayers, windows: tuple[int | None, ...]
) -> None:
    config = make_layers(*windows)
    specs = get_kv_cache_spec(config)
    plain = RoseAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )
    assert list(specs.values()) == [plain] * 3
    # vLLM's own arithmetic: room for max_model_len, and its groups.
    assert plain.max_memory_usage_bytes(config) == 1024 * TOKEN_BYTES
    (group,) = get_kv_cache_groups(config, specs)
    assert is_rose_group(group.kv_cache_spec) and len(group.layer_names) == 3
    assert block_bytes(group) == 3 * BLOCK_SIZE * TOKEN_BYTES
    # The kernels still have the windows.
    layers = config.compilation_config.static_forward_context.values()
    assert [layer.impl.sliding_window for layer in layers] == list(windows)


def only_group(config: Any, kinds: list[type]) -> Any:
    """Return the group of all layers, whose specifications are of these classes."""
    specs = get_kv_cache_spec(config)
    assert [type(spec) for spec in specs.values()] == kinds
    (group,) = get_kv_cache_groups(config, specs)
    assert is_rose_group(group.kv_cache_spec)
    return group


def test_layers_of_different_shapes_are_one_group(make_layers: MakeLayers) -> None:
    config = make_layers(WINDOW, None, layer_options={1: {"head_size": 128}})
    group = only_group(config, [RoseAttentionSpec] * 2)
    assert type(group.kv_cache_spec) is UniformTypeKVCacheSpecs
    assert block_bytes(group) == (1 + 2) * BLOCK_SIZE * TOKEN_BYTES


def test_windows_with_a_cache_of_another_type_are_in_the_group(make_layers: MakeLayers) -> None:
    """For groups of their own vLLM gives them other blocks, in pages as large as those of the other layers."""
    config = make_layers(WINDOW, None, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["sliding_window"])
    for shared_page in (None, 3 * BLOCK_SIZE * TOKEN_BYTES):
        config.cache_config.skip_page_size_padded = shared_page
        specs = get_kv_cache_spec(config)
        windowed, plain = specs.values()
        assert (windowed.block_size, windowed.page_size_bytes) == (BLOCK_SIZE, BLOCK_SIZE * TOKEN_BYTES)
        assert (plain.block_size, plain.page_size_bytes) == (BLOCK_SIZE, BLOCK_SIZE * TOKEN_BYTES // 4)
        (group,) = get_kv_cache_groups(config, specs)
        assert is_rose_group(group.kv_cache_spec)


MIXED = {
    "hf_overrides": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
}


def test_windows_beside_other_layers_have_groups_of_their_own(
    make_layers: MakeLayers, rose_log: list[str]
) -> None:
    config = make_layers(WINDOW, None, WINDOW, WINDOW, **MIXED)
    rose_log.clear()
    specs = get_kv_cache_spec(config)
    assert [type(spec) for spec in specs.values()].count(SlidingWindowSpec) == 3
    kv_cache_config = KVCacheConfig(9, [], get_kv_cache_groups(config, specs))
    groups = RoseGroups.of(kv_cache_config)
    assert groups.group_types == (GroupType(), GroupType(WINDOW, 3))
    assert sorted(groups.places) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert (groups.block_size, groups.block_bytes) == (BLOCK_SIZE, BLOCK_SIZE * TOKEN_BYTES)
    for spec, (kind, _) in zip(groups.specs, groups.places, strict=True):
        assert isinstance(spec, SlidingWindowSpec) == (kind == 1)
    (line,) = rose_log
    assert line == (
        "Rose's block manager releases what sliding windows have passed (3 of 4 layers, windows of 40 tokens): a "
        f"request of max_model_len 1,024 holds {(64 + 3 * 4) * 16 * TOKEN_BYTES / 2**20:.1f} MiB, "
        f"{4 * 64 / (64 + 3 * 4):.1f} times less than if it were kept"
    )


def test_windows_of_two_sizes_are_two_kinds(make_layers: MakeLayers) -> None:
    config = make_layers(2 * WINDOW, None, WINDOW, None, **MIXED)
    groups = RoseGroups.of(KVCacheConfig(9, [], get_kv_cache_groups(config, get_kv_cache_spec(config))))
    assert [kind.window for kind in groups.group_types] == [None, WINDOW, 2 * WINDOW]


SHAPES: dict[str, tuple[tuple[int | None, ...], dict[str, Any], str]] = {
    "another shape": ((WINDOW, None), {"layer_options": {1: {"head_size": 128}}}, "layers of several shapes"),
    "never filled": ((1024, None), {}, "windows that max_model_len does not fill"),
    "windows only": ((WINDOW, WINDOW), {}, "no layers without a window"),
    "shared": (
        (WINDOW, None, WINDOW),
        {"layer_options": {2: {"kv_sharing_target_layer_name": "layers.0.attn"}}},
        "layers that share K/V",
    ),
    "another backend": (
        (WINDOW, None, None),
        {"layer_options": {2: {"attn_backend": OtherBackend}}},
        "another attention backend",
    ),
    "asked for": (
        (WINDOW, None),
        {"disable_hybrid_kv_cache_manager": True},
        "--disable-hybrid-kv-cache-manager",
    ),
    "drafts": (
        (WINDOW, None),
        {"speculative_config": n_grams()},
        "drafts",
    ),
    "pipeline stages": ((WINDOW, None), {"pipeline_parallel_size": 2}, "pipeline parallelism"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_what_has_no_groups_of_its_own_is_kept_and_the_log_says_why(
    make_layers: MakeLayers, rose_log: list[str], case: str
) -> None:
    windows, options, reason = SHAPES[case]
    config = make_layers(*windows, **MIXED, **options)
    rose_log.clear()
    specs = get_kv_cache_spec(config)
    assert all(isinstance(spec, FullAttentionSpec) for spec in specs.values())
    (group,) = get_kv_cache_groups(config, specs)
    assert RoseGroups.of(KVCacheConfig(9, [], [group])).group_types == (GroupType(),)
    (line,) = rose_log
    assert "keeps the K/V of sliding windows whole" in line and f"; reason: {reason}):" in line


def test_windows_are_vllms_without_roses_block_manager_or_backend(
    make_layers: MakeLayers, rose_log: list[str]
) -> None:
    # Replaced already, in this process.
    get_kv_cache_spec(make_layers(WINDOW))
    rose_log.clear()
    other = {"attn_backend": OtherBackend}
    for options in (HANDED_BACK, {"layer_options": {0: other, 1: other}, "attention_backend": "CPU_ATTN"}):
        config = make_layers(WINDOW, None, **options)
        specs = list(get_kv_cache_spec(config).values())
        assert type(specs[0]) is SlidingWindowSpec and isinstance(specs[1], FullAttentionSpec)
        assert specs[0].sliding_window == WINDOW
        assert not any("windows whole" in line for line in rose_log)


def test_a_drafter_of_another_backend_joins_the_group(make_layers: MakeLayers) -> None:
    for shape in ({}, {"head_size": 128}):
        drafter = {"attn_backend": OtherBackend, **shape}
        config = make_layers(None, WINDOW, 2 * WINDOW, layer_options={1: drafter, 2: drafter})
        only_group(config, [RoseAttentionSpec, *[FullAttentionSpec] * 2])


REASON = "no layers without a window"
LINE = "Rose's block manager keeps the K/V of sliding windows whole ({} layers, windows of {} tokens; "
LINE += f"reason: {REASON}): a request of "
LINE += "max_model_len {} holds {} MiB, {} times as much as with vLLM's own block manager"


@pytest.mark.parametrize(
    ("windows", "max_model_len", "said"),
    [
        # 39 tokens before the newest one, from inside a block: 4 of 64 blocks.
        ((WINDOW,) * 2, 1024, ("2 of 2", "40", "1,024", "2.0", "16.0")),
        ((WINDOW, None, 600), 1024, ("2 of 3", "40 and 600", "1,024", "3.0", f"{192 / (4 + 64 + 39):.1f}")),
        # 17: 16 tokens before the newest one, which may begin in one block and end in the next.
        ((17, 17), 1024, ("2 of 2", "17", "1,024", "2.0", "32.0")),
        ((WINDOW, None), 32, ("1 of 2", "40", "32", "0.1", "1.0")),
    ],
    ids=["all", "two sizes", "block borders", "never filled"],
)
def test_what_it_costs_is_said_once(
    make_layers: MakeLayers,
    rose_log: list[str],
    windows: tuple[int | None, ...],
    max_model_len: int,
    said: Any,
) -> None:
    config = make_layers(*windows, max_model_len=max_model_len)
    rose_log.clear()
    for _ in range(2):
        get_kv_cache_spec(config)
    assert rose_log == [LINE.format(*said)]


def test_only_one_rank_says_it_and_shared_caches_count_once(
    make_layers: MakeLayers, rose_log: list[str]
) -> None:
    shares = {2: {"kv_sharing_target_layer_name": "layers.0.attn"}}
    config = make_layers(WINDOW, None, WINDOW, layer_options=shares, tensor_parallel_size=2)
    rose_log.clear()
    config.parallel_config.rank = 1
    get_kv_cache_spec(config)
    assert rose_log == []
    config.parallel_config.rank = 0
    get_kv_cache_spec(config)
    assert rose_log == [LINE.format("1 of 2", "40", "1,024", "2.0", f"{128 / (4 + 64):.1f}")]
