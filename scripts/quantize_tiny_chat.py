"""Quantize models/tiny-qwen3-chat to float8, in the format and by the scheme FP8_DYNAMIC of llm-compressor.

    python scripts/quantize_tiny_chat.py --output models/tiny-qwen3-chat-fp8

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

SOURCE = Path(__file__).resolve().parents[1] / "models" / "tiny-qwen3-chat"
COPIED = (
    *("config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
)


def quantize(source: Path, output: Path) -> None:
    """Write a float8 form of a checkpoint: e4m3 weights with a scale for each output channel.

    Embedding, head and norms stay as they are. The same checkpoint gives the same bytes.
    """
    model = Qwen3ForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    )
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            lowest, highest = torch.aminmax(module.weight.detach(), dim=1, keepdim=True)
            scales, _ = calculate_qparams(lowest, highest, module.quantization_scheme.weights)
            module.weight_scale.data.copy_(scales)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(output)
    # Instead of what save_pretrained writes, which depends on the release of transformers.
    for name in COPIED:
        shutil.copyfile(source / name, output / name)
    compressor.update_config(str(output))


def perplexity(folder: Path, stream: torch.Tensor, *, quantizes_activations: bool = True) -> float:
    """Return the perplexity of token ids, in float32, for a float8 checkpoint with dequantized weights."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = quantizes_activations
    return math.exp(validation_loss(model, stream, 16, 256))


def main() -> None:
    """Write the float8 checkpoint and compare perplexities of held-out conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model files")
    output = parser.parse_args().output
    quantize(SOURCE, output)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    stream = torch.tensor(as_stream(tokenizer, conversations(500, 2)))
    weights_alone = perplexity(output, stream, quantizes_activations=False)
    console = Console()
    console.print(f"perplexity of bfloat16 weights: {perplexity(SOURCE, stream):.4f}")
    console.print(f"of float8 weights: {weights_alone:.4f}")
    console.print(f"of float8 weights and activations: {perplexity(output, stream):.4f}")


if __name__ == "__main__":
    main()
