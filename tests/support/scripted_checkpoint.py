"""A Qwen3 checkpoint that says what a script says: a next token depends on the last one alone.

It answers a question, calls a tool where a conversation has tools, and says what to make of a tool's result. The logits
are far apart, so that draws are the same at usual temperatures and whatever computes them; where a mask forbids the
script's token, those that end JSON are the most likely ones.

``python -m tests.support.scripted_checkpoint FOLDER`` writes it.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

_TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3-chat"
_END = "<|im_end|>"
_ANSWERS = ("<|answer|>", "The", " capital", " of", " France", " is", " Paris", ".", _END)
_CALLS = (
    "<|call|>",
    "<tool_call>",
    '\n{"name": "get_weather", ',
    '"arguments": ',
    '{"city": "Tokyo"}',
    "}\n",
    "</tool_call>",
    _END,
)
_CONCLUDES = ("<|result|>", "It", "'s", " sunny", " in Tokyo", ".")
_TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{{ message.tool_calls | tojson if message.tool_calls }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ "<|result|>" if messages[-1].role == "tool" else "<|call|>" if tools else "<|answer|>" }}
{%- endif %}"""
ANSWER = "".join(_ANSWERS[1:-1])
CONCLUSION = "".join(_CONCLUDES[1:])
TOOL, ARGUMENTS = "get_weather", '{"city": "Tokyo"}'


def write_scripted_qwen3(path: Path) -> Path:
    """Write config, weights in float32, a tokenizer and a chat template to ``path``, and return it."""
    tokenizer = AutoTokenizer.from_pretrained(str(_TOKENIZER))
    scripts = (_ANSWERS, _CALLS, _CONCLUDES)
    new = [each for script in scripts for each in script if len(tokenizer.encode(each)) > 1]
    tokenizer.add_tokens([each for each in new if not each.startswith("<|")])
    tokenizer.add_tokens([each for each in new if each.startswith("<|")], special_tokens=True)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(path)
    end = tokenizer.convert_tokens_to_ids(_END)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=end,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.load_state_dict(_weights(model.state_dict(), tokenizer))
    model.generation_config.eos_token_id = end
    model.save_pretrained(path)
    return path


def _weights(weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """Return weights of a model whose layers add nothing, and whose head finds what its embedding names."""
    ids = [[tokenizer.encode(each)[0] for each in script] for script in (_ANSWERS, _CALLS, _CONCLUDES)]
    # What no script has goes on with a text without an end.
    around = [tokenizer.encode(each)[0] for each in (" a", " rose", " and", " a")]
    following = dict(pair for script in (*ids, around) for pair in pairwise(script))
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    norms = {
        name: torch.ones_like(weight) for name, weight in weights.items() if name.endswith("norm.weight")
    }
    num_tokens, width = weights["lm_head.weight"].shape
    generator = torch.Generator().manual_seed(0)
    names = torch.randint(0, 2, (num_tokens, width), generator=generator) * 2.0 - 1.0
    # The first dimension is the same for all: how likely a token is where a mask forbids the one that was named.
    names[:, 0] = 1.0
    head = torch.zeros(num_tokens, width)
    for each in set(following.values()):
        head[each] = names[each]
    head[:, 0] = _fallbacks(tokenizer, num_tokens)
    embedding = torch.stack([names[following.get(each, around[0])] for each in range(num_tokens)])
    return {**zeros, **norms, "lm_head.weight": head, "model.embed_tokens.weight": embedding}


def _fallbacks(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> torch.Tensor:
    """Return logits, all different: of signs that end JSON, other signs, digits, letters, and the rest."""
    kinds = ('"}', '"', "}", "]", ":", "{", "[", ",", "1")
    texts = tokenizer.convert_ids_to_tokens(range(num_tokens))
    ranks = [kinds.index(text) if text in kinds else len(kinds) + (not text.isalnum()) for text in texts]
    return 10.0 - torch.tensor(ranks) - torch.arange(num_tokens) / num_tokens


if __name__ == "__main__":
    write_scripted_qwen3(Path(sys.argv[1]))
