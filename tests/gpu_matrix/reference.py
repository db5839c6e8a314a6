"""What transformers in float32 says of the tokens that an engine was given and gave. Nothing of vLLM is imported.

``python -m tests.gpu_matrix.reference CHECKPOINT ANSWERS OUT`` adds it to what ``side`` wrote.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.gpu_matrix.traffic import TOP_K, Picture

TRANSFORMERS_CLASS = {"MiMoForCausalLM": "Qwen2ForCausalLM"}
"""Where transformers has a model without its MTP head under another name."""


@dataclass(frozen=True)
class Exact:
    """Of each of N tokens, behind all before it."""

    logprobs: list[float]
    leads: list[float]
    """Logit of the token minus the largest other one: below 0, float32 prefers another."""
    bounds: list[float]
    """Log-probability of the ``top_k``-th likeliest token."""


class Reference:
    """A checkpoint in float32, on a GPU where there is one."""

    def __init__(self, path: Path, top_k: int) -> None:
        # Products and convolutions may round to 10 bits otherwise.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
        model_class = getattr(transformers, TRANSFORMERS_CLASS.get(architecture, architecture))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model_class.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self._model = self._model.to(device).eval()
        self._path, self._top_k, self._device = path, top_k, device

    @torch.inference_mode()
    def exact(self, tokens: Sequence[int], pictures: Sequence[Image.Image] = ()) -> Exact:
        """Return what float32 says of ``tokens[1:]``.

        Args:
            pictures: for the placeholders among ``tokens``, which stand there once for each part of a picture.
        """
        ids = torch.tensor([list(tokens)], device=self._device)
        logits = self._model(ids, use_cache=False, **self._inputs_of(ids, pictures)).logits[0, :-1].float()
        chosen = ids[0, 1:, None]
        logprobs = logits.log_softmax(-1)
        own = logits.gather(-1, chosen)[:, 0]
        others = logits.scatter(-1, chosen, float("-inf")).amax(-1)
        return Exact(
            logprobs.gather(-1, chosen)[:, 0].tolist(),
            (own - others).tolist(),
            logprobs.topk(self._top_k, dim=-1).values[:, -1].tolist(),
        )

    @torch.inference_mode()
    def embedding(self, tokens: Sequence[int]) -> list[float]:
        """Return the last hidden state of the last token, scaled to length 1."""
        ids = torch.tensor([list(tokens)], device=self._device)
        hidden = self._model.model(ids, use_cache=False).last_hidden_state[0, -1].float()
        return torch.nn.functional.normalize(hidden, dim=0).tolist()

    def _inputs_of(self, ids: torch.Tensor, pictures: Sequence[Image.Image]) -> dict[str, Any]:
        if not pictures:
            return {}
        processor = transformers.AutoImageProcessor.from_pretrained(self._path)
        inputs = dict(processor(images=list(pictures), return_tensors="pt").to(self._device))
        if "image_grid_thw" in inputs:
            # Positions of these models depend on where pictures are.
            inputs["mm_token_type_ids"] = (ids == self._model.config.image_token_id).int()
        return inputs


def drawn(picture: Picture) -> Image.Image:
    """Return the picture's pixels: squares of 14 x 14 in random colors."""
    shape = (picture.height // 14, picture.width // 14, 3)
    colors = np.random.default_rng(picture.seed).integers(0, 256, shape, np.uint8)
    return Image.fromarray(colors.repeat(14, 0).repeat(14, 1))


def add_exact(case: str, path: Path, answers: dict[str, dict[str, Any]]) -> None:
    """Add to each answer what float32 says of its tokens."""
    known: dict[tuple[Any, ...], Any] = {}
    references = {False: Reference(path, TOP_K)}
    if case == "LoRA":
        references[True] = Reference(path / "adapter" / "merged", TOP_K)
    for answer in answers.values():
        ask = answer["ask"]
        prompt = answer["prompt"]
        reference = references[ask["is_adapted"]]
        if case == "pooling":
            answer["exact"] = reference.embedding(prompt)
            continue
        pictures = [drawn(Picture(**part)) for part in ask["parts"] if isinstance(part, dict)]
        for completion in answer["completions"]:
            tokens = completion["tokens"]
            key = (
                ask["is_adapted"],
                *prompt,
                *tokens,
                *(str(part) for part in ask["parts"] if isinstance(part, dict)),
            )
            if key not in known:
                known[key] = reference.exact([*prompt, *tokens], pictures)
            first = len(prompt) - 1
            for name, values in dataclasses.asdict(known[key]).items():
                completion[f"exact_{name}"] = values[first:]
            answer["exact_prompt_logprobs"] = known[key].logprobs[:first]


def main(checkpoint: Path, answers: Path, out: Path) -> None:
    """Move a side's answers to its report, with what float32 says."""
    started = time.monotonic()
    report = json.loads(answers.read_text())
    add_exact(report["case"], checkpoint, report["answers"])
    report["seconds"]["reference"] = time.monotonic() - started
    out.write_text(json.dumps(report))
    answers.unlink()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
