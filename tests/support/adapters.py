"""LoRA adapters as PEFT writes them, with random weights, and checkpoints into which they are merged.

``make_case`` brings what transformers makes of prompts with each.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rose_backend import LLM, LoRARequest, SamplingParams
from tests.support.llama_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.reference_generation import SAFE_LEAD, GreedyReference, Prompts, greedy_reference

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def write_adapter(
    path: Path,
    base: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 1,
    modules: Sequence[str] = MODULES,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Write an adapter of ``modules`` of all layers of ``base``, and return ``path``.

    Args:
        fields: of adapter_config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules and "layers" in module:
            (fan_out, fan_in), prefix = weight.shape, f"{_PREFIX}{module}"
            shapes = {"A": (rank, fan_in), "B": (fan_out, rank)}
            for letter, shape in shapes.items():
                drawn = torch.randn(shape, generator=random) / math.sqrt(shape[1])
                tensors[f"{prefix}.lora_{letter}.weight"] = drawn.to(dtype)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        **fields,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def write_merged(path: Path, base: Path, adapter: Path) -> Path:
    """Write ``base`` with the weights that an adapter makes of it, ``W + scale * B @ A``, and return ``path``."""
    shutil.copytree(base, path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            weights[name.removeprefix(_PREFIX).replace(".lora_A", "")] += scale * b.float() @ a.float()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


NUM_TOKENS = 24
KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 8, "alpha": 16},
    {"rank": 3, "alpha": 4, "use_rslora": True, "modules": ["q_proj", "v_proj"]},
    {
        "rank": 16,
        "alpha": 8,
        "dtype": torch.bfloat16,
        "modules": ["k_proj", "o_proj", "up_proj", "down_proj"],
    },
    {"rank": 1, "alpha": 1.5, "modules": ["gate_proj"]},
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass
class AdapterCase:
    """A checkpoint and adapters for it, and what transformers makes of prompts with each of them; first without."""

    path: Path
    adapters: list[LoRARequest | None]
    prompts: list[Prompts]
    references: list[GreedyReference]

    def llm(self, **options: Any) -> LLM:
        """Return an engine, to be closed."""
        return LLM(str(self.path), **{"device": "cpu", "dtype": "float32", "enable_lora": True, **options})

    def generate(
        self, llm: LLM, which: list[int], *, num_prompts: int = 6, params: SamplingParams = GREEDY
    ) -> list[str]:
        """Generate for prompts of these adapters in turns; return what differs from transformers."""
        order = [(each, index) for index in range(num_prompts) for each in which]
        outputs = llm.generate(
            [list(self.prompts[each][index]) for each, index in order],
            params,
            lora_request=[self.adapters[each] for each, _ in order],
        )
        llm.core.check_integrity()
        return [
            f"adapter {each}: {self.references[each].explain_difference(index, completion.token_ids)}"
            for (each, index), output in zip(order, outputs, strict=True)
            for completion in output.outputs
            if tuple(completion.token_ids) != self.references[each].token_ids[index]
        ]


def make_case(path: Path, family: str) -> AdapterCase:
    """Write a checkpoint of a family and adapters of all ``KINDS`` for it."""
    base = write_checkpoint(path / "base", family)
    adapters: list[LoRARequest | None] = [None]
    checkpoints = [base]
    for number, kind in enumerate(KINDS, 1):
        adapter = write_adapter(path / f"adapter{number}", base, seed=number, **kind)
        checkpoints.append(write_merged(path / f"merged{number}", base, adapter))
        adapters.append(LoRARequest(f"adapter {number}", number, str(adapter)))
    prompts, references = zip(*map(_tie_free, checkpoints), strict=True)
    # What one prompt gives depends on the adapter.
    answers = {greedy_reference(each, prompts[0][:1], 8).token_ids for each in checkpoints}
    assert len(answers) == len(checkpoints)
    return AdapterCase(base, adapters, list(prompts), list(references))


def _tie_free(checkpoint: Path) -> tuple[Prompts, GreedyReference]:
    for seed in range(64):
        random = np.random.default_rng(seed)
        lengths = (1, 15, 16, 17, 40, 150)
        prompts = tuple(tuple(random.integers(1, VOCAB_SIZE, length).tolist()) for length in lengths)
        reference = greedy_reference(checkpoint, prompts, NUM_TOKENS)
        if min(map(min, reference.leads)) > SAFE_LEAD:
            return prompts, reference
    raise AssertionError("every seed has a tie")
