"""What an EAGLE-3 head proposes, computed densely in float32 over whole texts: no cache, no step before."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class DenseHead:
    """A model and its head in plain torch.

    Args:
        model, head: directories.
    """

    def __init__(self, model: Path, head: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._config = json.loads((head / "config.json").read_text())
        self._tensors = {name: each.float() for name, each in load_file(head / "model.safetensors").items()}
        self._embedding = self._model.get_input_embeddings().weight

    def propose(self, tokens: list[int], num_drafts: int) -> list[int]:
        """Return the drafts after ``tokens``, of which the model has computed all but the last."""
        return [draft for draft, _ in self.propose_with_margins(tokens, num_drafts)]

    @torch.inference_mode()
    def propose_with_margins(self, tokens: list[int], num_drafts: int) -> list[tuple[int, float]]:
        """Return the same, and by how much the logit of each draft is the largest."""
        states = self._model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        # What comes into layer i; the first has the embedding.
        held = [states[layer][0] for layer in sorted(self._config["eagle_aux_hidden_state_layer_ids"])]
        features = torch.cat(held, dim=1) @ self._tensors["fc.weight"].T
        following, drafts = list(tokens[1:]), []
        for _ in range(num_drafts):
            hidden = self._layer(torch.tensor(following), features)[-1:]
            logits = self._norm(hidden, "norm") @ self._tensors["lm_head.weight"].T
            (best, second), (token, _) = (each[0].tolist() for each in logits.topk(2))
            token += int(self._tensors["d2t"][token]) if "d2t" in self._tensors else 0
            drafts.append((token, best - second))
            following.append(token)
            features = torch.cat([features, hidden])
        return drafts

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self._config["rms_norm_eps"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self._tensors[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _layer(self, following: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return hidden states before the last norm, [T, E]."""
        of_tokens = self._norm(self._embedding[following], "midlayer.input_layernorm")
        normed = self._norm(features, "midlayer.hidden_norm")
        joined = torch.cat([of_tokens, normed], dim=1)
        heads, kv_heads = self._config["num_attention_heads"], self._config["num_key_value_heads"]
        query, key, value = (
            self._linear(joined, f"midlayer.self_attn.{name}").view(len(following), count, -1).transpose(0, 1)
            for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
        )
        query, key = self._rotated(query), self._rotated(key)
        key, value = (each.repeat_interleave(heads // kv_heads, dim=0) for each in (key, value))
        scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
        causal = torch.ones(len(following), len(following), dtype=torch.bool).tril()
        attended = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ value
        base = normed if self._config.get("norm_before_residual") else features
        hidden = base + self._linear(attended.transpose(0, 1).flatten(1), "midlayer.self_attn.o_proj")
        inner = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (self._linear(inner, f"midlayer.mlp.{name}") for name in ("gate_proj", "up_proj"))
        return hidden + self._linear(F.silu(gate) * up, "midlayer.mlp.down_proj")

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        theta = self._config.get("rope_theta", 10_000.0)
        frequencies = theta ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.arange(x.shape[1]).float()[:, None] * frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
