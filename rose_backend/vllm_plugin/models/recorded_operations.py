"""What a model's steps launch, on tensors without memory: its kernels are recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rose_backend.vllm_plugin.models.model_choice import DECODERS, GPT2

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from rose_backend.kernels import HeadRotation
    from rose_backend.layers.linear import DecoderLayer, Linear
    from rose_backend.vllm_plugin.attention.metadata import RoseAttentionMetadata
    from rose_backend.vllm_plugin.attention.recorded_steps import RecordedAttention


def launch_model(vllm_config: VllmConfig, layer: Any) -> None:
    """Launch attention of each size of step, with the layers around it where they are Rose's.

    Args:
        layer: a ``RoseAttentionImpl`` of the model.
    """
    from rose_backend.vllm_plugin.attention.recorded_steps import launch_steps

    architectures = set(vllm_config.model_config.hf_config.architectures or ())
    if architectures & set(DECODERS.values()):
        _launch_decoder(vllm_config, layer)
        return
    launch_steps(vllm_config, layer)
    if GPT2 in architectures:
        _launch_gpt2(vllm_config)


def _launch_gpt2(vllm_config: VllmConfig) -> None:
    """Launch the operations of ``gpt2.py``, whose kernels do not depend on the number of tokens."""
    import torch

    from rose_backend import kernels

    model = vllm_config.model_config
    width = model.get_hidden_size()
    inner = (model.hf_config.n_inner or 4 * width) // vllm_config.parallel_config.tensor_parallel_size
    narrow, wide = (torch.empty((2, size), dtype=model.dtype, device="meta") for size in (width, inner))
    kernels.layer_norm(narrow, narrow[0], narrow[0], 1e-5)
    kernels.add_layer_norm(narrow, narrow, narrow[0], narrow[0], 1e-5)
    kernels.bias_gelu(wide, wide[0])
    kernels.bias_residual(narrow, narrow[0], narrow)


def _launch_decoder(vllm_config: VllmConfig, layer: Any) -> None:
    from rose_backend.vllm_plugin.attention.recorded_steps import recorded_steps

    decoder = RecordedDecoder(vllm_config, layer)
    for metadata in recorded_steps(vllm_config, layer):
        decoder.run(metadata)


class RecordedDecoder:
    """A decoder without memory, of which one layer or two run: what the second gets is what all later ones get."""

    def __init__(self, vllm_config: VllmConfig, layer: Any) -> None:
        import torch

        from rose_backend.kernels import HeadRotation
        from rose_backend.layers.linear import pack_layer, packs_layers
        from rose_backend.vllm_plugin.attention.recorded_steps import RecordedAttention
        from rose_backend.vllm_plugin.options import rose_options

        model, self._switches = vllm_config.model_config, rose_options(vllm_config)
        self._has_ranks = vllm_config.parallel_config.tensor_parallel_size > 1
        decoder = recorded_layer(vllm_config, layer)
        self._final_norm = decoder.attn_norm
        if not self._has_ranks and packs_layers(self._switches, torch.device("meta")):
            decoder = pack_layer(decoder)
        table = torch.empty((model.max_model_len, layer.head_size), dtype=torch.float32, device="meta")
        self._decoder, self._layer = decoder, layer
        self._rotation = HeadRotation(table, decoder.query_norm, decoder.key_norm, 1e-6)
        self._embedding = torch.empty(
            (model.get_vocab_size(), model.get_hidden_size()), dtype=model.dtype, device="meta"
        )
        self._attend = RecordedAttention(vllm_config, layer)

    def run(self, metadata: RoseAttentionMetadata) -> None:
        """Launch a step; of decodes, whose layers pass on what norms need, two layers."""
        import torch

        from rose_backend.kernels import embed_tokens
        from rose_backend.layers.decoder import run_layers
        from rose_backend.layers.linear import ResidualStream

        num_tokens, layer = metadata.num_actual_tokens, self._layer
        layers = [self._decoder] * (2 if metadata.decodes_only else 1)
        input_ids = torch.empty(num_tokens, dtype=torch.int32, device="meta")
        positions = torch.empty(num_tokens, dtype=torch.int64, device="meta")
        run_layers(
            *embed_tokens(input_ids, positions, self._embedding),
            layers,
            self._final_norm,
            _RecordedSteps(self._attend, metadata, layer),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            switches=self._switches,
            mlp=ResidualStream.silu_mlp,
            positions=positions,
            rotations=[self._rotation] * len(layers),
            all_reduce=(lambda partial_sum: partial_sum) if self._has_ranks else None,
        )


def recorded_layer(vllm_config: VllmConfig, layer: Any) -> DecoderLayer:
    """Return a decoder layer of a rank without memory, as ``LoadedLayer`` makes it of vLLM's modules."""
    import torch

    from rose_backend.layers.linear import DecoderLayer, Linear, Mlp, Norm

    model = vllm_config.model_config
    fields, width = model.hf_text_config, model.get_hidden_size()
    inner = fields.intermediate_size // vllm_config.parallel_config.tensor_parallel_size
    heads, kv_heads, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    is_llama = model.architecture in ("LlamaForCausalLM", "MistralForCausalLM")
    has_bias = bool(getattr(fields, "attention_bias", False) or (is_llama and getattr(fields, "bias", False)))
    has_qkv_bias = bool(getattr(fields, "qkv_bias", has_bias)) if is_llama else has_bias
    has_qkv_bias = has_qkv_bias or model.architecture == "Qwen2ForCausalLM"
    has_mlp_bias = is_llama and bool(getattr(fields, "mlp_bias", False))

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=model.dtype, device="meta")

    def linear(fan_in: int, fan_out: int, bias: bool) -> Linear:
        return Linear(empty(fan_out, fan_in).t(), empty(fan_out) if bias else None)

    norm = Norm(empty(width), None, 1e-6)
    head_norm = empty(size) if model.architecture == "Qwen3ForCausalLM" else None
    return DecoderLayer(
        norm,
        linear(width, (heads + 2 * kv_heads) * size, has_qkv_bias),
        linear(heads * size, width, has_bias and is_llama),
        norm,
        Mlp(linear(width, 2 * inner, has_mlp_bias), linear(inner, width, has_mlp_bias)),
        head_norm,
        head_norm,
    )


class _RecordedSteps:
    """A ``StepAttention`` whose layers are all the same."""

    last_tokens = None

    def __init__(self, attend: RecordedAttention, metadata: RoseAttentionMetadata, layer: Any) -> None:
        self._attend, self._metadata = attend, metadata
        self.decodes_only = metadata.decodes_only
        self.appends = bool(layer.appends_in_attention)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        overlap: bool = False,
        rotation: HeadRotation | None = None,
    ) -> torch.Tensor:
        import torch

        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._attend(self._metadata, query, key, value, out, overlap=overlap, rotation=rotation)
        return out.flatten(1)
