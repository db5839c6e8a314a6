"""Stands where vLLM's model runner stands: one attention layer, its cache and the buffers a step is laid out in."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, customize_attention_spec

from rose_backend.conformance.attention.batch import Row
from rose_backend.conformance.attention.cases import Case
from rose_backend.conformance.attention.scene import Scene, alibi_slopes, allocation, sinks
from rose_backend.vllm_plugin import register

# The second layer is never run: its half of the cache must stay as it is.
LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
MAX_MODEL_LEN = 1024
PADDING_SLOT = -1


def find_backend(name: str) -> AttentionBackendEnum:
    """Return vLLM's entry of a backend, which may be a plug-in's; a ``module:Class`` becomes its CUSTOM one.

    Raises:
        ImportError, AttributeError: there is no such class.
        ValueError: there is no such name.
    """
    load_general_plugins()
    register()
    if ":" in name:
        path = name.replace(":", ".")
        resolve_obj_by_qualname(path)
        register_backend(AttentionBackendEnum.CUSTOM, path)
        name = AttentionBackendEnum.CUSTOM.name
    entry = AttentionBackendEnum[name]
    entry.get_class()
    return entry


def refusals(backend: type[AttentionBackend], case: Case) -> list[str]:
    """Return why ``backend`` says that it cannot run ``case``, in its own words."""
    return backend.validate_configuration(
        head_size=case.head_size,
        dtype=case.dtype,
        kv_cache_dtype=case.cache_dtype,
        block_size=case.block_size,
        use_mla=False,
        has_sink=case.sinks,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=current_platform.get_device_capability(),
        attn_type="decoder",
        has_sliding_window=case.sliding_window is not None,
    )


class Host:
    """Runs steps through a backend as vLLM's runners do: persistent buffers, a builder's metadata, the layer's impl."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        case: Case,
        config: VllmConfig,
        device: torch.device,
        *,
        max_rows: int,
        max_tokens: int,
        num_blocks: int,
        layout: str | None = None,
    ) -> None:
        self.backend, self.case, self.config, self.device = backend, case, config, device
        self.has_own_order = backend.get_name() == "CPU_ATTN"
        """Whether only the backend knows where in a block a key or value lies."""
        layouts = backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)
        config.cache_config.kv_cache_layout = layout or layouts[0].name
        _give_heads(config, case)
        self.layer = self._make_layers()
        self.group = self._make_group()
        self.cache = self._allocate_cache(num_blocks)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._start_loc = torch.zeros(max_rows + 1, **int32)
        self._seq_lens = torch.zeros(max_rows, **int32)
        self._block_table = torch.zeros(max_rows, num_blocks, **int32)
        self._slots = torch.full((max_tokens,), PADDING_SLOT, dtype=torch.int64, device=device)
        width = (case.heads + 2 * case.kv_heads) * case.head_size
        # Queries, keys and values are slices of one projection, as models hand them over.
        self._projection = torch.zeros(max_tokens, width, dtype=case.dtype, device=device)
        self._output = torch.zeros(max_tokens, case.heads, case.head_size, dtype=case.dtype, device=device)

    def _make_layers(self) -> Attention:
        case = self.case
        options = {"sinks": sinks(case).to(self.device)} if case.sinks else {}
        with (
            set_current_vllm_config(self.config),
            set_default_torch_dtype(case.dtype),
            torch.device(self.device),
        ):
            layers = [
                Attention(
                    case.heads,
                    case.head_size,
                    case.head_size**-0.5,
                    num_kv_heads=case.kv_heads,
                    alibi_slopes=alibi_slopes(case).tolist() if case.alibi else None,
                    cache_config=self.config.cache_config,
                    logits_soft_cap=case.soft_cap,
                    per_layer_sliding_window=case.sliding_window,
                    prefix=name,
                    attn_backend=self.backend,
                    **options,
                )
                for name in LAYERS
            ]
            for layer in layers:
                layer.process_weights_after_loading(case.dtype)
        layer = layers[0]
        for name, scale in (("k", case.key_scale), ("v", case.value_scale)):
            getattr(layer, f"_{name}_scale").fill_(scale)
            getattr(layer, f"_{name}_scale_cpu").fill_(scale)
            setattr(layer, f"_{name}_scale_float", scale)
        return layer

    def _make_group(self) -> AttentionGroup:
        with set_current_vllm_config(self.config):
            spec = customize_attention_spec(self.backend, self.layer.get_kv_cache_spec(self.config))
            group = AttentionGroup(self.backend, LAYERS, spec, 0)
            group.create_metadata_builders(self.config, self.device, kernel_block_size=spec.block_size)
        return group

    def _allocate_cache(self, num_blocks: int) -> torch.Tensor:
        spec = self.group.kv_cache_spec
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        layer_stride, block_stride, *_ = compute_layout_strides(spec, num_blocks, len(LAYERS), layout)
        size = len(LAYERS) * num_blocks * spec.page_size_bytes
        cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[KVCacheTensor(size, LAYERS, layer_stride, block_stride)],
            kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)],
        )
        cache = allocate_kv_cache(cache_config, self.device, layout, [spec.block_size])[LAYERS[0]]
        self.layer.bind_kv_cache(cache)
        return cache

    @property
    def graph_support(self) -> AttentionCGSupport:
        """What the backend's builder declares about CUDA graphs."""
        return self.group.get_metadata_builder().get_cudagraph_support(self.config, self.group.kv_cache_spec)

    def scene(self, rows: tuple[Row, ...], **options: Any) -> Scene:
        """Lay requests out in this host's cache."""
        store = self._store_by_backend if self.has_own_order else None
        return Scene(self.case, rows, self.cache, store=store, **options)

    def _store_by_backend(
        self, cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if len(slots):
            self.layer.impl.do_kv_cache_update(self.layer, key, value, cache, slots)

    def assert_cache(self, scene: Scene, expected: torch.Tensor) -> None:
        """Compare the whole allocation with ``expected``, where the place of a number in a block is known."""
        if not self.has_own_order:
            assert torch.equal(allocation(scene.cache), expected), "the cache is not what it must be"

    def step(self, scene: Scene, **options: Any) -> list[torch.Tensor]:
        """Run one eager step, laid out by ``options``. Returns each row's output, [query_len, HQ, D]."""
        common = self.lay_out(scene, **options)
        self._run(self.group.build_metadata(common), len(scene.query) + options.get("padded_tokens", 0))
        return self.outputs(scene)

    def lay_out(
        self,
        scene: Scene,
        *,
        padded_rows: int = 0,
        padded_tokens: int = 0,
        counts_padding: bool = True,
        slot_mapping: torch.Tensor | None = None,
    ) -> CommonAttentionMetadata:
        """Copy a scene into the buffers and describe it.

        Padding is vLLM's: rows of length 0 with the null block, tokens with slot -1.

        Args:
            counts_padding: as for full CUDA graphs; False as for piecewise ones, where only the tensors are longer.
        """
        num_tokens, num_rows = len(scene.query), len(scene.rows)
        end = num_tokens + padded_tokens
        parts = [part.flatten(1) for part in (scene.query, scene.key, scene.value)]
        self._projection[:num_tokens] = torch.cat(parts, 1)
        self._projection[num_tokens:end] = torch.nan
        self._output.fill_(torch.nan)
        self._start_loc[: num_rows + 1] = torch.tensor(scene.starts)
        self._start_loc[num_rows + 1 :] = num_tokens
        self._seq_lens[:num_rows] = torch.tensor([row.seq_len for row in scene.rows])
        self._seq_lens[num_rows:] = 0
        self._block_table.zero_()
        for row, blocks in enumerate(scene.block_tables):
            self._block_table[row, : len(blocks)] = blocks
        self._slots[:num_tokens] = scene.slot_mapping if slot_mapping is None else slot_mapping
        self._slots[num_tokens:] = PADDING_SLOT
        return self._describe(
            num_rows + (padded_rows if counts_padding else 0),
            num_tokens + (padded_tokens if counts_padding else 0),
            max(row.query_len for row in scene.rows),
            max(row.seq_len for row in scene.rows),
        )

    def _describe(
        self, num_rows: int, num_tokens: int, max_query_len: int, max_seq_len: int
    ) -> CommonAttentionMetadata:
        start_loc = self._start_loc[: num_rows + 1]
        return CommonAttentionMetadata(
            query_start_loc=start_loc,
            query_start_loc_cpu=start_loc.cpu(),
            seq_lens=self._seq_lens[:num_rows],
            seq_lens_cpu_upper_bound=self._seq_lens[:num_rows].cpu(),
            num_reqs=num_rows,
            num_actual_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_table_tensor=self._block_table[:num_rows],
            slot_mapping=self._slots[:num_tokens],
        )

    def capture(self, num_rows: int, query_len: int) -> torch.cuda.CUDAGraph:
        """Capture a graph of ``num_rows`` dummy requests of ``query_len`` tokens, as vLLM does at start-up."""
        num_tokens = num_rows * query_len
        self._start_loc[: num_rows + 1] = torch.arange(num_rows + 1) * query_len
        self._start_loc[num_rows + 1 :] = num_tokens
        self._seq_lens[:num_rows] = query_len
        self._seq_lens[num_rows:] = 0
        self._block_table.zero_()
        self._slots.fill_(PADDING_SLOT)
        common = self._describe(num_rows, num_tokens, query_len, MAX_MODEL_LEN)
        self._run(self.group.build_metadata_for_cudagraph_capture(common), num_tokens)
        torch.cuda.synchronize()
        metadata = self.group.build_metadata_for_cudagraph_capture(common)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(metadata, num_tokens)
        return graph

    def replay(
        self, graph: torch.cuda.CUDAGraph, scene: Scene, *, num_rows: int, query_len: int
    ) -> list[torch.Tensor]:
        """Run a scene by a graph captured for ``num_rows``, padded up to it."""
        padded_rows = num_rows - len(scene.rows)
        common = self.lay_out(scene, padded_rows=padded_rows, padded_tokens=padded_rows * query_len)
        self.group.build_metadata(common)
        graph.replay()
        return self.outputs(scene)

    def seen_query(self, scene: Scene) -> torch.Tensor:
        """Return the queries as the backend gets them: rounded to float8 where it asks vLLM for that."""
        if self.layer.query_quant is None:
            return scene.query
        rounded, scale = self._rounded_query(scene.query)
        return (rounded.double() * scale.double()).view(scene.query.shape)

    def _rounded_query(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The operator takes tokens by features.
        return self.layer.query_quant(query.flatten(1).contiguous(), self.layer._q_scale)

    def _run(self, metadata: Any, num_tokens: int) -> None:
        case, layer = self.case, self.layer
        sizes = [heads * case.head_size for heads in (case.heads, case.kv_heads, case.kv_heads)]
        query, key, value = (
            part.unflatten(1, (-1, case.head_size)) for part in self._projection[:num_tokens].split(sizes, 1)
        )
        if layer.query_quant is not None:
            query = self._rounded_query(query)[0].view(query.shape)
        slots = self._slots[:num_tokens]
        with set_forward_context(
            dict.fromkeys(LAYERS, metadata),
            self.config,
            num_tokens=num_tokens,
            slot_mapping=dict.fromkeys(LAYERS, slots),
        ):
            if not self.backend.forward_includes_kv_cache_update:
                layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
            layer.impl.forward(
                layer, query, key, value, layer.kv_cache, metadata, output=self._output[:num_tokens]
            )

    def outputs(self, scene: Scene) -> list[torch.Tensor]:
        """Return copies of each row's output."""
        lengths = [row.query_len for row in scene.rows]
        return list(self._output[: sum(lengths)].clone().split(lengths))


def _give_heads(config: VllmConfig, case: Case) -> None:
    # Builders size their scratch by the model's shape. The embedded model has another than the case.
    model_config = config.model_config
    for name, value in (
        ("get_num_attention_heads", case.heads),
        ("get_num_kv_heads", case.kv_heads),
        ("get_head_size", case.head_size),
    ):
        object.__setattr__(model_config, name, lambda *_, _value=value: _value)
