"""Quantize models/tiny-qwen3-chat, in the format and by the schemes FP8_DYNAMIC and W4A16 of llm-compressor.

    python scripts/quantize_tiny_chat.py --scheme FP8_DYNAMIC --output models/tiny-qwen3-chat-fp8
    python scripts/quantize_tiny_chat.py --scheme W4A16 --output models/tiny-qwen3-chat-w4a16

Rounding and packing are done by compressed-tensors, the package that llm-compressor uses and vLLM depends on.
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from rich.console import Console
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from tiny_chat.conversations import conversations
from tiny_gpt2.training import validation_loss
from train_tiny_chat import as_stream

SCHEMES = ("FP8_DYNAMIC", "W4A16")
"""e4m3 with a scale for each output channel, and activations, too; 4 bits, symmetric, with one for 128 columns."""
SOURCE = Path(__file__).resolve().parents[1] / "models" / "tiny-qwen3-chat"
COPIED = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)


def quantize(source: Path, output: Path, scheme: str) -> None:
    """Write a checkpoint with linear layers quantized by one of ``SCHEMES``.

    Embedding, head and norms stay as they are. The same checkpoint gives the same bytes.
    """
    model = Qwen3ForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    group = preset_name_to_scheme(scheme, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            # Of all columns of an output channel, or of as many as share a scale.
            columns = module.weight.detach().unflatten(
                1, (-1, group.weights.group_size or module.in_features)
            )
            lowest, highest = torch.aminmax(columns, dim=2)
            scales, _ = calculate_qparams(lowest, highest, group.weights)
            module.weight_scale.data.copy_(scales)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(output)
    # Instead of what save_pretrained writes, which depends on the release of transformers.
    for name in COPIED:
        shutil.copyfile(source / name, output / name)
    compressor.update_config(str(output))


def perplexity(folder: Path, stream: torch.Tensor, *, quantizes_activations: bool = True) -> float:
    """Return the perplexity of token ids, in float32, for a quantized checkpoint with dequantized weights."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = quantizes_activations
    return math.exp(validation_loss(model, stream, 16, 256))


def main() -> None:
    """Write the checkpoint and compare perplexities of held-out conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scheme", choices=SCHEMES, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model files")
    options = parser.parse_args()
    output = options.output
    quantize(SOURCE, output, options.scheme)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    stream = torch.tensor(as_stream(tokenizer, conversations(500, 2)))
    weights_alone = perplexity(output, stream, quantizes_activations=False)
    console = Console()
    console.print(f"perplexity of bfloat16 weights: {perplexity(SOURCE, stream):.4f}")
    console.print(f"of quantized weights: {weights_alone:.4f}")
    if options.scheme == "FP8_DYNAMIC":
        console.print(f"of quantized weights and activations: {perplexity(output, stream):.4f}")


if __name__ == "__main__":
    main()
