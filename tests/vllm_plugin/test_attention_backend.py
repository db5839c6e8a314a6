"""ROSE's attention against plain softmax attention, in every layout that vLLM may lay the cache out in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.config.utils import replace
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from rose_backend.errors import ConfigError
from rose_backend.kernels.captured_graphs import current_workspace
from rose_backend.vllm_plugin.attention import backend
from rose_backend.vllm_plugin.attention.backend import RoseAttentionBackend, RoseAttentionImpl
from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadataBuilder
from rose_backend.vllm_plugin.kv_cache.spec import RoseAttentionSpec, as_rose_spec
from tests.support.vllm_plugin.configs import MakeConfig

BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 16, 24, 4, 2, 64
SCALE = HEAD_SIZE**-0.5
# (tokens computed before, new tokens): decodes, fresh prompts, chunks that start inside a block.
STEPS = {
    "mixed": [(0, 1), (37, 1), (16, 1), (0, 33), (5, 20)],
    "decodes": [(0, 1), (15, 1), (16, 1), (40, 1)],
    "prefills": [(0, 17), (31, 2), (3, 30)],
}


class Step:
    """Random requests with their history already in the cache."""

    def __init__(self, rows: list[tuple[int, int]], *, cache_order: str = "BHNC", padding: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = rows
        num_tokens = sum(new for _, new in rows)
        self.num_tokens = num_tokens
        self.query = torch.randn(num_tokens + padding, NUM_HEADS, HEAD_SIZE, generator=generator)
        self.key = torch.randn(num_tokens + padding, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
        self.value = torch.randn(num_tokens + padding, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
        # Slots that no request has written hold NaN: reading one shows.
        sizes = {"B": NUM_BLOCKS, "H": NUM_KV_HEADS, "N": BLOCK_SIZE, "C": 2 * HEAD_SIZE}
        storage = torch.full([sizes[letter] for letter in cache_order], float("nan"))
        self.cache = storage.permute([cache_order.index(letter) for letter in "BHNC"])
        width = 8
        free = torch.randperm(NUM_BLOCKS - 1, generator=generator).add(1).tolist()
        self.table = torch.zeros(len(rows), width, dtype=torch.int32)
        self.history: list[tuple[torch.Tensor, torch.Tensor]] = []
        slots, starts = [], [0]
        for row, (computed, new) in enumerate(rows):
            for column in range(-(-(computed + new) // BLOCK_SIZE)):
                self.table[row, column] = free.pop()
            key = torch.randn(computed, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
            value = torch.randn(computed, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
            self.history.append((key, value))
            for position in range(computed):
                block = int(self.table[row, position // BLOCK_SIZE])
                self.cache[block, :, position % BLOCK_SIZE] = torch.cat((key[position], value[position]), -1)
            for position in range(computed, computed + new):
                slots.append(
                    int(self.table[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
                )
            starts.append(starts[-1] + new)
        self.slot_mapping = torch.tensor(slots + [-1] * padding)
        self.starts = starts

    def common_metadata(self) -> CommonAttentionMetadata:
        start_loc = torch.tensor(self.starts, dtype=torch.int32)
        seq_lens = torch.tensor([computed + new for computed, new in self.rows], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=start_loc,
            query_start_loc_cpu=start_loc,
            seq_lens=seq_lens,
            num_reqs=len(self.rows),
            num_actual_tokens=self.num_tokens,
            max_query_len=max(new for _, new in self.rows),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.table,
            slot_mapping=self.slot_mapping,
        )

    def expected(self, sliding_window: int | None = None) -> torch.Tensor:
        out = torch.empty(self.num_tokens, NUM_HEADS, HEAD_SIZE)
        for row, (computed, new) in enumerate(self.rows):
            tokens = slice(self.starts[row], self.starts[row + 1])
            key = torch.cat((self.history[row][0], self.key[tokens])).repeat_interleave(
                NUM_HEADS // NUM_KV_HEADS, 1
            )
            value = torch.cat((self.history[row][1], self.value[tokens])).repeat_interleave(
                NUM_HEADS // NUM_KV_HEADS, 1
            )
            scores = torch.einsum("qhd,khd->hqk", self.query[tokens], key) * SCALE
            distance = (torch.arange(new) + computed)[:, None] - torch.arange(computed + new)[None]
            hidden = (distance < 0) | (distance >= (sliding_window or 1 << 30))
            out[tokens] = torch.einsum(
                "hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value
            )
        return out


@pytest.fixture(scope="module")
def configs(make_config: MakeConfig) -> dict[bool, Any]:
    """Return configurations by whether attention stores K/V itself."""
    return {
        fused: make_config(additional_config={"rose": {"fused_kv_append": fused}}) for fused in (True, False)
    }


def run(step: Step, config: Any, **layer_options: Any) -> torch.Tensor:
    with set_current_vllm_config(config):
        impl = RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS, **layer_options)
        builder = RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    metadata = builder.build(0, step.common_metadata())
    output = torch.full_like(step.query, 7.0)
    assert impl.forward(None, step.query, step.key, step.value, step.cache, metadata, output) is output
    return output


@pytest.mark.parametrize("order", ["".join(order) for order in itertools.permutations("BHN")])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_any_layout_gives_plain_attention(configs: dict[bool, Any], order: str, fused: bool) -> None:
    step = Step(STEPS["mixed"], cache_order=f"{order}C")
    output = run(step, configs[fused])
    torch.testing.assert_close(output, step.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
@pytest.mark.parametrize("name", STEPS)
def test_new_tokens_are_stored_and_nothing_else_changes(
    configs: dict[bool, Any], name: str, fused: bool
) -> None:
    step = Step(STEPS[name], padding=3)
    wanted = step.cache.clone()
    for token, slot in enumerate(step.slot_mapping[: step.num_tokens].tolist()):
        wanted[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = torch.cat((step.key[token], step.value[token]), -1)
    output = run(step, configs[fused])
    assert torch.equal(step.cache.nan_to_num(nan=-1e9), wanted.nan_to_num(nan=-1e9))
    torch.testing.assert_close(output[: step.num_tokens], step.expected(), rtol=1e-5, atol=1e-5)
    assert (output[step.num_tokens :] == 7.0).all(), "padding was written"


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])
def test_sliding_window(configs: dict[bool, Any], fused: bool) -> None:
    step = Step(STEPS["mixed"])
    output = run(step, configs[fused], sliding_window=9)
    torch.testing.assert_close(output, step.expected(9), rtol=1e-5, atol=1e-5)


def test_a_separate_write_lets_requests_read_what_others_store_in_the_same_step(
    configs: dict[bool, Any],
) -> None:
    # vLLM's own manager publishes blocks in the step that fills them: the first row reads the last row's new block.
    step = Step([(16, 1), (16, 4), (0, 16)])
    for reader in (0, 1):
        step.table[reader, 0] = step.table[2, 0]
        step.history[reader] = (step.key[5:21], step.value[5:21])
    step.cache[step.table[2, 0]] = float("nan")
    output = run(step, configs[False])
    torch.testing.assert_close(output, step.expected(), rtol=1e-5, atol=1e-5)


def test_a_layer_that_shares_anothers_cache_writes_nothing(configs: dict[bool, Any]) -> None:
    step = Step(STEPS["mixed"])
    run(step, configs[True])
    before, expected = step.cache.clone(), step.expected()
    step.key, step.value = torch.zeros_like(step.key), torch.zeros_like(step.value)
    output = run(step, configs[True], kv_sharing_target_layer_name="other")
    assert torch.equal(step.cache.nan_to_num(), before.nan_to_num())
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_profiling_without_a_cache_returns_zeros(configs: dict[bool, Any]) -> None:
    with set_current_vllm_config(configs[True]):
        impl = RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS)
    output = torch.full((3, NUM_HEADS, HEAD_SIZE), float("nan"))
    query = torch.randn(3, NUM_HEADS, HEAD_SIZE)
    assert impl.forward(None, query, query, query, torch.tensor([]), None, output).eq(0).all()


def test_unknown_layer_options_are_refused(configs: dict[bool, Any]) -> None:
    with set_current_vllm_config(configs[True]):
        with pytest.raises(ConfigError, match="chunk_lookback"):
            RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, chunk_lookback=4)
        with pytest.raises(ConfigError, match="ENCODER_ONLY"):
            RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, attn_type=AttentionType.ENCODER_ONLY)


def test_the_platform_refuses_what_the_backend_does_not_support() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rose_backend.vllm_plugin import register

    register()
    good = AttentionSelectorConfig(64, torch.float32, "auto", 16)
    rose = AttentionBackendEnum["ROSE"]
    assert CpuPlatform.get_attn_backend_cls(rose, attn_selector_config=good).endswith("RoseAttentionBackend")
    assert "CPUAttentionBackend" in CpuPlatform.get_attn_backend_cls(AttentionBackendEnum.CPU_ATTN, good)
    assert "CPUAttentionBackend" in CpuPlatform.get_attn_backend_cls(None, good)
    for change, reason in (
        ({"head_size": 60}, "head_size"),
        ({"head_size": 520}, "head_size"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 with a model in float32"),
        ({"kv_cache_dtype": "fp8", "use_per_head_quant_scales": True}, "per-head quant scales"),
        ({"block_size": 24}, "block_size"),
        ({"use_mla": True}, "MLA"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "ENCODER_ONLY"),
    ):
        with pytest.raises(ConfigError, match=reason):
            CpuPlatform.get_attn_backend_cls(rose, good._replace(**change))


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_float8_needs_a_gpu_that_converts_it(capability: tuple[int, int], refused: bool) -> None:
    for cache_dtype in ("auto", "fp8", "fp8_e4m3"):
        reasons = RoseAttentionBackend.validate_configuration(
            **AttentionSelectorConfig(64, torch.float16, cache_dtype, 16)._asdict(),
            device_capability=DeviceCapability(*capability),
        )
        if refused and cache_dtype != "auto":
            assert reasons == [f"kv_cache_dtype {cache_dtype} needs compute capability 8.9, this GPU has 8.0"]
        else:
            assert reasons == []


def test_reloaded_sinks_keep_their_address(configs: dict[bool, Any]) -> None:
    loaded = torch.nn.Parameter(torch.zeros(NUM_HEADS, dtype=torch.bfloat16), requires_grad=False)
    with set_current_vllm_config(configs[True]):
        impl = RoseAttentionImpl(NUM_HEADS, HEAD_SIZE, SCALE, NUM_KV_HEADS, sinks=loaded)
    addresses = set()
    for value in (1.5, -2.0):
        loaded.fill_(value)
        impl.process_weights_after_loading(torch.bfloat16)
        sinks = impl._options(None, torch.device("cpu")).sinks
        assert sinks is not None
        assert sinks.dtype == torch.float32 and sinks.tolist() == [value] * NUM_HEADS
        addresses.add(sinks.data_ptr())
    assert len(addresses) == 1


def test_specifications_are_marked_and_otherwise_equal() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    marked = RoseAttentionBackend.customize_spec(full)
    assert type(marked) is RoseAttentionSpec and marked.page_size_bytes == full.page_size_bytes
    assert type(RoseAttentionSpec.merge([marked, as_rose_spec(full)])) is RoseAttentionSpec
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=8
    )
    assert as_rose_spec(window) is window


def test_layers_of_one_engine_share_scratch_memory_with_no_other(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = []
    for config in (make_config(), make_config()):
        for _ in range(2):
            with set_current_vllm_config(config):
                layers.append(RoseAttentionImpl(2, 64, 0.125, 2))
    assert layers[0].workspace is layers[1].workspace and layers[2].workspace is layers[3].workspace
    assert layers[0].workspace is not layers[2].workspace
    # vLLM copies configurations, one for flashinfer's warm-up for example.
    assert replace(config, cache_config=config.cache_config).cache_config is config.cache_config
    used = []
    monkeypatch.setattr(backend, "attend", lambda *args, **options: used.append(current_workspace()))
    step = Step(STEPS["decodes"])
    metadata = RoseAttentionMetadataBuilder(None, ["layer"], config, torch.device("cpu")).build(
        0, step.common_metadata()
    )
    query = torch.zeros(4, 2, 64)
    cache = torch.zeros(8, 2, 16, 128)
    layers[0].forward(None, query, query, query, cache, metadata, query)
    assert used == [layers[0].workspace]
