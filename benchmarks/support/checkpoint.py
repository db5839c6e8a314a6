"""The checkpoint a benchmark runs on: one that is given, or random weights with the shapes of a model people know.

torch, transformers and safetensors are imported late: what they take is no part of ``--help``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import string
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import (
        Gemma3TextConfig,
        GptOssConfig,
        LlamaConfig,
        PreTrainedConfig,
        Qwen3_5TextConfig,
        Qwen3Config,
        Qwen3MoeConfig,
        Qwen3VLConfig,
    )

END_OF_TEXT = "<|endoftext|>"
GPT2_124M, LLAMA_1B, LLAMA_8B, QWEN3_06B = "gpt2-124m", "llama-1b", "llama-8b", "qwen3-0.6b"
GEMMA3_4B, GPT_OSS_20B, QWEN3_30B = "gemma-3-4b", "gpt-oss-20b", "qwen3-30b-a3b"
QWEN3_VL_4B, QWEN35_4B = "qwen3-vl-4b", "qwen3.5-4b"
LLAMA_8B_FP8, QWEN3_8B_FP8, QWEN3_30B_FP8 = "llama-8b-fp8", "qwen3-8b-fp8", "qwen3-30b-a3b-fp8"
LLAMA_8B_INT4, LLAMA_8B_AWQ = "llama-8b-int4", "llama-8b-awq"
QWEN3_14B_AWQ, QWEN3_32B_AWQ = "qwen3-14b-awq", "qwen3-32b-awq"
QWEN3_30B_12_LAYERS = "qwen3-30b-a3b-12-layers"
SHAPES = {
    GPT2_124M: "GPT-2 124M",
    LLAMA_1B: "Llama 1B",
    LLAMA_8B: "Llama 8B",
    QWEN3_06B: "Qwen3 0.6B",
    GEMMA3_4B: "Gemma 3 4B",
    GPT_OSS_20B: "gpt-oss 20B",
    QWEN3_30B: "Qwen3 30B-A3B",
    QWEN3_30B_12_LAYERS: "Qwen3 30B-A3B with 12 layers",
    QWEN3_VL_4B: "Qwen3-VL 4B",
    QWEN35_4B: "Qwen3.5 4B",
    LLAMA_8B_FP8: "Llama 8B in float8, a scale for each row",
    QWEN3_8B_FP8: "Qwen3 8B in float8, a scale for each block",
    QWEN3_30B_FP8: "Qwen3 30B-A3B in float8, a scale for each block",
    LLAMA_8B_INT4: "Llama 8B in int4, a scale for 128 columns",
    LLAMA_8B_AWQ: "Llama 8B in int4 by AWQ, a scale and a zero for 128 columns",
    QWEN3_14B_AWQ: "Qwen3 14B in int4 by AWQ, a scale and a zero for 128 columns",
    QWEN3_32B_AWQ: "Qwen3 32B in int4 by AWQ, a scale and a zero for 128 columns",
}
"""What a random checkpoint can look like, and what people call it."""

QUANTIZED_FORMATS = {
    LLAMA_8B_FP8: "compressed-tensors channel",
    QWEN3_8B_FP8: "fp8 blocks",
    QWEN3_30B_FP8: "fp8 blocks",
    LLAMA_8B_INT4: "pack-quantized 128",
    LLAMA_8B_AWQ: "awq 128 zeros",
    QWEN3_14B_AWQ: "awq 128 zeros",
    QWEN3_32B_AWQ: "awq 128 zeros",
}
"""As they are published: by Red Hat, and by Qwen."""

EAGLE3_HEAD = "eagle3-head"
"""Name of the folder below a random checkpoint's with a head for it."""

KEPT_IN = "ROSE_BENCHMARK_CHECKPOINTS"
"""Variable of the environment. vLLM recompiles for a model in another folder, which takes a minute a start."""

VOCAB_SIZE = 50_257
QWEN3_VOCAB_SIZE = 151_936
LLAMA_8B_VOCAB_SIZE = 128_256
GEMMA3_VOCAB_SIZE = 262_208
GPT_OSS_VOCAB_SIZE = 201_088
QWEN35_VOCAB_SIZE = 248_320
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""The last ones of Qwen3-VL's vocabulary."""


def write_head(model: Path) -> None:
    """Write a random EAGLE-3 head, with 32,000 words as published, into a random checkpoint's folder if it has none."""
    from tests.support.eagle_checkpoints import write_eagle3_head

    folder, config = model / EAGLE3_HEAD, json.loads((model / "config.json").read_text())
    if (folder / "config.json").is_file():
        return
    # By default vLLM hands on what enters three layers that fewer do not have.
    few = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if config["num_hidden_layers"] < 7 else {}
    write_eagle3_head(folder, model, draft_vocab_size=min(32_000, config["vocab_size"] // 2), std=0.02, **few)


@contextlib.contextmanager
def checkpoint(
    model: str | None, shape: str = GPT2_124M, *, small: bool = False, window: int | None = None
) -> Iterator[str]:
    """Return ``model``, or for None a random checkpoint: made for this run, or kept in a folder below ``KEPT_IN``.

    Args:
        shape: one of ``SHAPES``.
        small: of all shapes but GPT-2's only two narrow layers, for a CPU.
        window: tokens that the longest request has, for shapes whose window is shorter. GPT-2's positions are weights:
            its window stays as it is.
    """
    if model is not None:
        yield model
        return
    if kept_in := os.environ.get(KEPT_IN):
        folder = Path(kept_in, "-".join((shape, *["small"] * small, *[f"window-{window}"] * bool(window))))
        whole = folder / "whole"  # says that the other files are there
        if not whole.is_file():
            write_checkpoint(folder, shape, small=small, window=window)
            whole.touch()
        yield str(folder)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), shape, small=small, window=window)
        yield directory


@contextlib.contextmanager
def one_checkpoint(model: str | None, shape: str, *, small: bool) -> Iterator[None]:
    """Make the checkpoint that ``checkpoint`` returns in this process and in all that it starts meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        is_kept = KEPT_IN in os.environ
        os.environ.setdefault(KEPT_IN, directory)
        try:
            with checkpoint(model, shape, small=small):
                yield
        finally:
            if not is_kept:
                del os.environ[KEPT_IN]


def write_checkpoint(folder: Path, shape: str, *, small: bool, window: int | None = None) -> None:
    """Write random weights and a tokenizer that has a text for each token; see ``checkpoint``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from tests.support.tiny_checkpoint import write_random_gpt2_124m

    if shape == GPT2_124M:
        write_random_gpt2_124m(folder)
        _write_tokenizer(folder, VOCAB_SIZE)
        return
    config = config_of(shape, small=small)
    text = config.get_text_config()
    # Rotary positions have no weights: the model is the same with a longer window.
    text.max_position_embeddings = max(text.max_position_embeddings, window or 0)
    torch.manual_seed(0)
    if shape in (GPT_OSS_20B, QWEN3_30B, QWEN3_30B_12_LAYERS, *QUANTIZED_FORMATS):
        _write_layer_by_layer(folder, config, QUANTIZED_FORMATS.get(shape))
    else:
        # A billion numbers and more: seconds on a GPU.
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            factory = AutoModelForImageTextToText if shape == QWEN3_VL_4B else AutoModelForCausalLM
            model = factory.from_config(config, dtype=getattr(torch, str(config.dtype).split(".")[-1]))
        model.save_pretrained(folder)
        del model
    if torch.cuda.is_available():
        # An engine that takes its share of the whole GPU finds it empty.
        torch.cuda.empty_cache()
    if shape == QWEN3_VL_4B:
        _write_processor(folder, text.vocab_size)
    else:
        _write_tokenizer(folder, text.vocab_size)


def config_of(shape: str, *, small: bool = False) -> PreTrainedConfig:
    """Return the configuration of a shape but GPT-2's."""
    make_configs = {
        LLAMA_1B: llama_1b_config,
        LLAMA_8B: llama_8b_config,
        QWEN3_06B: qwen3_config,
        GEMMA3_4B: gemma3_config,
        GPT_OSS_20B: gpt_oss_config,
        QWEN3_30B: qwen3_moe_config,
        QWEN3_30B_12_LAYERS: partial(qwen3_moe_config, num_layers=12),
        QWEN3_VL_4B: qwen3_vl_config,
        QWEN35_4B: qwen3_5_config,
        LLAMA_8B_FP8: llama_8b_config,
        QWEN3_8B_FP8: qwen3_8b_config,
        QWEN3_30B_FP8: qwen3_moe_config,
        LLAMA_8B_INT4: llama_8b_config,
        LLAMA_8B_AWQ: llama_8b_config,
        QWEN3_14B_AWQ: partial(qwen3_large_config, num_layers=40, num_heads=40, intermediate_size=17_408),
        QWEN3_32B_AWQ: partial(qwen3_large_config, num_layers=64, num_heads=64, intermediate_size=25_600),
    }
    return make_configs[shape](small=small)


def llama_1b_config(*, small: bool = False) -> LlamaConfig:
    """Return Llama 3.2 1B's layers, with the vocabulary of the tokenizer here and a window of 2,048 tokens."""
    from transformers import LlamaConfig

    width, num_layers = (256, 2) if small else (2048, 16)
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        dtype="float16",
    )


def llama_8b_config(*, small: bool = False) -> LlamaConfig:
    """Return Llama 3.1 8B's layers and vocabulary, with a window of 4,096 tokens."""
    from transformers import LlamaConfig

    width, num_layers = (256, 2) if small else (4096, 32)
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=1000 if small else LLAMA_8B_VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 128,
        num_key_value_heads=1 if small else 8,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )


def qwen3_config(*, small: bool = False) -> Qwen3Config:
    """Return Qwen3 0.6B's layers and vocabulary, with a window of 4,096 tokens."""
    from transformers import Qwen3Config

    width, num_layers = (128, 2) if small else (1024, 28)
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=1000 if small else QWEN3_VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )


def qwen3_8b_config(*, small: bool = False) -> Qwen3Config:
    """Return Qwen3 8B's layers and vocabulary, with a window of 4,096 tokens."""
    config = qwen3_config(small=small)
    if not small:
        config.hidden_size, config.intermediate_size, config.num_hidden_layers = 4096, 12_288, 36
        config.num_attention_heads, config.tie_word_embeddings = 32, False
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    return config


def qwen3_large_config(
    *, small: bool = False, num_layers: int, num_heads: int, intermediate_size: int
) -> Qwen3Config:
    """Return Qwen3 14B's or 32B's layers and vocabulary, with a window of 4,096 tokens."""
    config = qwen3_8b_config(small=small)
    if not small:
        config.hidden_size, config.intermediate_size, config.num_hidden_layers = (
            5120,
            intermediate_size,
            num_layers,
        )
        config.num_attention_heads = num_heads
        config.layer_types = ["full_attention"] * num_layers
    return config


def qwen3_moe_config(*, small: bool = False, num_layers: int = 48) -> Qwen3MoeConfig:
    """Return Qwen3 30B-A3B's layers, or the first of them, and its vocabulary, with a window of 4,096 tokens."""
    from transformers import Qwen3MoeConfig

    width, num_layers = (128, 2) if small else (2048, num_layers)
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=1000 if small else QWEN3_VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=3 * width,
        moe_intermediate_size=3 * width // 8,
        num_experts=8 if small else 128,
        num_experts_per_tok=2 if small else 8,
        norm_topk_prob=True,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=1 if small else 4,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )


def qwen3_5_config(*, small: bool = False) -> Qwen3_5TextConfig:
    """Return Qwen3.5 4B's text layers and vocabulary, with a window of 4,096 tokens; three of four keep a state."""
    from transformers import Qwen3_5TextConfig

    width, num_layers = (128, 2) if small else (2560, 32)
    linear, full = "linear_attention", "full_attention"
    return Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        vocab_size=1000 if small else QWEN35_VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=18 * width // 5,
        num_hidden_layers=num_layers,
        num_attention_heads=2 if small else 16,
        num_key_value_heads=1 if small else 4,
        head_dim=256,
        linear_num_key_heads=1 if small else 16,
        linear_num_value_heads=2 if small else 32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        layer_types=[full if index % 4 == 3 or (small and index) else linear for index in range(num_layers)],
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )


def qwen3_vl_config(*, small: bool = False) -> Qwen3VLConfig:
    """Return Qwen3-VL 4B's layers of text and vision and its vocabulary, with a window of 4,096 tokens."""
    from transformers import Qwen3VLConfig

    width, num_layers, vocab_size = (256, 2, 1000) if small else (2560, 36, QWEN3_VOCAB_SIZE)
    text = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 19 * width // 5,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4 if small else 32,
        "num_key_value_heads": 1 if small else 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 5_000_000.0},
            **{"mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
        "tie_word_embeddings": True,
        **{"bos_token_id": 0, "eos_token_id": 0, "dtype": "bfloat16"},
    }
    vision = {
        "depth": 3 if small else 24,
        "hidden_size": 64 if small else 1024,
        "intermediate_size": 256 if small else 4096,
        "num_heads": 1 if small else 16,
        "out_hidden_size": width,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [0, 1, 2] if small else [5, 11, 17],
    }
    start = vocab_size - len(VISION_TOKENS)
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = {name: start + index for index, name in enumerate(names)}
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **ids,
    )


def gemma3_config(*, small: bool = False) -> Gemma3TextConfig:
    """Return Gemma 3 4B's text layers and vocabulary, with a window of 4,096 tokens; five of six layers see 1,024."""
    from transformers import Gemma3TextConfig

    width, num_layers = (128, 2) if small else (2560, 34)
    sliding, full = "sliding_attention", "full_attention"
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=1000 if small else GEMMA3_VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=2 if small else 8,
        num_key_value_heads=1 if small else 4,
        head_dim=64 if small else 256,
        query_pre_attn_scalar=256,
        sliding_window=1024,
        layer_types=[full if index % 6 == 5 or (small and index) else sliding for index in range(num_layers)],
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )


def gpt_oss_config(*, small: bool = False) -> GptOssConfig:
    """Return gpt-oss 20B's layers and vocabulary, not quantized; every other layer sees 128 tokens only."""
    from transformers import GptOssConfig

    width, num_layers = (128, 2) if small else (2880, 24)
    return GptOssConfig(
        architectures=["GptOssForCausalLM"],
        vocab_size=1000 if small else GPT_OSS_VOCAB_SIZE,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=2 if small else 64,
        num_key_value_heads=1 if small else 8,
        head_dim=64,
        num_local_experts=4 if small else 32,
        num_experts_per_tok=2 if small else 4,
        sliding_window=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )


def _write_layer_by_layer(folder: Path, config: PreTrainedConfig, form: str | None) -> None:
    """Write a model too large to be in memory twice: one file for each layer, and one for what is around them.

    Args:
        form: of quantized weights, one of ``QUANTIZED_FORMATS``; None: none are.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    from tests.support.quantized_checkpoints import quantized, write_description

    num_layers, device = config.num_hidden_layers, "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch, torch.device(device):
        one_layer = type(config).from_dict({**config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
        one = AutoModelForCausalLM.from_config(one_layer, dtype=torch.bfloat16)
        one.save_pretrained(scratch, max_shard_size="1TB")
        del one
        tensors = load_file(Path(scratch, "model.safetensors"), device=device)
    config.save_pretrained(folder)
    layer = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    files = {"around.safetensors": {name: tensor for name, tensor in tensors.items() if name not in layer}}
    files |= {f"layer-{index}.safetensors": layer for index in range(num_layers)}
    weight_map = {}
    for index, (file, parts) in enumerate(files.items(), start=-1):
        for tensor in parts.values():
            if tensor.ndim > 1:
                tensor.normal_(0.0, config.initializer_range)
        named = {name.replace(".layers.0.", f".layers.{index}."): tensor for name, tensor in parts.items()}
        if form is not None:
            named, _ = quantized(named, form)
        save_file(named, folder / file)
        weight_map |= dict.fromkeys(named, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    if form is not None:
        write_description(folder, form, ["lm_head"])


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer of ``vocab_size`` tokens without training one.

    Token 0 ends a text, then come the 256 bytes, then words of two letters, of three and of four. Random weights draw
    from the whole vocabulary: with a small trained tokenizer most tokens would have no text, and no engine would have
    any text to make.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = (itertools.product(string.ascii_lowercase, repeat=length) for length in (2, 3, 4))
    all_words = map("".join, itertools.chain.from_iterable(letters))
    words = list(itertools.islice(all_words, vocab_size - 1 - len(alphabet)))
    vocab = {token: index for index, token in enumerate([END_OF_TEXT, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(word[:-1], word[-1]) for word in words]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.save_pretrained(folder)


def _write_processor(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with ``VISION_TOKENS`` behind all others, and what prepares images. Needs torchvision."""
    from transformers import (
        AutoTokenizer,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    _write_tokenizer(folder, vocab_size - len(VISION_TOKENS))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([*VISION_TOKENS], special_tokens=True)
    # An image of the largest size is encoded while vLLM starts.
    images = Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, size={"shortest_edge": 64 * 64, "longest_edge": 1024 * 1024}
    )
    videos = Qwen3VLVideoProcessor(patch_size=16, merge_size=2)
    Qwen3VLProcessor(images, tokenizer, video_processor=videos).save_pretrained(folder)


@dataclass(frozen=True)
class ModelFacts:
    """What a benchmark has to know of a model."""

    vocab_size: int
    max_model_len: int
    kv_elements_per_token: int
    """Keys and values of one token, over all layers, as if those with a state had some, too: room for states."""


def write_adapters(model: str, folder: Path, num_adapters: int, rank: int) -> list[str]:
    """Write random LoRA adapters of all products of a Llama's or Qwen's layers; return the folder of each."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads * head_size, config.num_key_value_heads * head_size
    products = {
        "self_attn.q_proj": (width, heads),
        **{f"self_attn.{name}_proj": (width, kv_heads) for name in ("k", "v")},
        "self_attn.o_proj": (heads, width),
        **{f"mlp.{name}_proj": (width, inner) for name in ("gate", "up")},
        "mlp.down_proj": (inner, width),
    }
    modules = [name.rpartition(".")[2] for name in products]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    random, folders = torch.Generator().manual_seed(0), []
    for number in range(num_adapters):
        adapter = folder / f"adapter-{number}"
        adapter.mkdir()
        tensors = {}
        for layer, (name, (fan_in, fan_out)) in itertools.product(
            range(config.num_hidden_layers), products.items()
        ):
            for part, shape in (("A", (rank, fan_in)), ("B", (fan_out, rank))):
                tensor = 0.02 * torch.randn(shape, generator=random)
                tensors[f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"] = tensor.half()
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
        folders.append(str(adapter))
    return folders


def model_facts(model: str) -> ModelFacts:
    """Read a checkpoint's configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelFacts(
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        kv_elements_per_token=2 * config.num_hidden_layers * num_kv_heads * head_size,
    )
