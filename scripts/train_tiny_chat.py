"""Train models/tiny-qwen3-chat from scratch: a Qwen3 of 1.5 million parameters on conversations made for it.

    python scripts/train_tiny_chat.py --output models/tiny-qwen3-chat

The conversations come from scripts/tiny_chat, nothing is downloaded. ``--steps 20`` shows that everything works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tiny_chat.conversations import Message, conversations
from tiny_gpt2.tokenizer import END_OF_TEXT, train_tokenizer
from tiny_gpt2.training import TrainingSettings, train, validation_loss

START, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 1536
MAX_WEIGHT_BYTES = 4_000_000
PROMPTS = (
    "Hello!",
    "Who are you?",
    "What colour is the sky?",
    "What is the capital of France?",
    "What is 7 plus 5?",
    "What is the opposite of hot?",
    "How many legs does a spider have?",
    "Why is the sky blue?",
    "What is a KV cache?",
    "Tell me a story about a fox.",
)


def rendered(messages: list[Message]) -> str:
    """Return a conversation as the chat template writes it."""
    return "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE; the last three of its tokens begin and end messages and texts."""
    tokenizer = train_tokenizer(texts, VOCAB_SIZE - 2)
    tokenizer.add_special_tokens([START, END])
    return tokenizer


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Return a new Qwen3: width 128, 5 layers, 4 heads of 64 over 2 key/value heads, tied head."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            initializer_range=0.06,
            bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
            eos_token_id=tokenizer.token_to_id(END),
        )
    )


def as_stream(tokenizer: Tokenizer, talks: list[list[Message]]) -> list[int]:
    """Return the ids of all conversations one after the other, with the end of a text between them."""
    end: int = tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment]
    return [
        id for encoding in tokenizer.encode_batch(list(map(rendered, talks))) for id in (*encoding.ids, end)
    ]


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Write weights in bfloat16, configurations, tokenizer and chat template."""
    end_of_text, end = (tokenizer.token_to_id(token) for token in (END_OF_TEXT, END))
    model = model.bfloat16().cpu().eval()
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text,
        eos_token_id=[end, end_of_text],
        pad_token_id=end_of_text,
        do_sample=True,
        temperature=0.3,
        top_p=0.9,
    )
    model.save_pretrained(output)
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    # transformers before release 5 does not know rope_parameters.
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    write_json(output / "config.json", config)
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "bos_token": END_OF_TEXT,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
    }
    write_json(output / "tokenizer_config.json", settings)
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    size = (output / "model.safetensors").stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise ValueError(f"model.safetensors has {size} bytes, at most {MAX_WEIGHT_BYTES} are allowed")


def write_json(path: Path, content: object) -> None:
    """Write an indented file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def answers(output: Path) -> dict[str, str]:
    """Load the written files; return the greedy answer to each of ``PROMPTS``."""
    model = Qwen3ForCausalLM.from_pretrained(output, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(output, local_files_only=True)
    found = {}
    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**inputs, max_new_tokens=120, do_sample=False)[0]
        found[prompt] = tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def main() -> None:
    """Draw the conversations, train tokenizer and model, write all into the output folder, and ask ten questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model files")
    parser.add_argument("--conversations", type=int, default=120_000, help="how many are drawn")
    parser.add_argument("--steps", type=int, default=1_500, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="windows a step (default: %(default)s)")
    parser.add_argument("--window", type=int, default=256, help="tokens a window (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak of the schedule")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    console = Console()
    settings = TrainingSettings(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        window=arguments.window,
        warmup_steps=100,
        evaluations=20,
    )
    torch.manual_seed(settings.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    talks, held_out = conversations(arguments.conversations, 1), conversations(500, 2)
    tokenizer = make_tokenizer([message["content"] for talk in talks[:20_000] for message in talk])
    train_ids, validation_ids = as_stream(tokenizer, talks), as_stream(tokenizer, held_out)
    model = build_model(tokenizer)
    console.print(
        f"{len(train_ids):,} + {len(validation_ids):,} tokens, {model.num_parameters():,} parameters"
    )
    device = torch.device(arguments.device)
    result = train(model, train_ids, validation_ids, settings, device, console)

    result.model.bfloat16().float()
    stream = torch.tensor(validation_ids, device=device)
    rounded = validation_loss(result.model, stream, settings.batch_size, settings.window)
    save(result.model, tokenizer, arguments.output)
    log = {
        "parameters": model.num_parameters(),
        "conversations": {"train": len(talks), "validation": len(held_out)},
        "tokens": {"train": len(train_ids), "validation": len(validation_ids)},
        "settings": dataclasses.asdict(settings),
        "best": dataclasses.asdict(result.best),
        "bfloat16_validation": round(rounded, 4),
        "versions": {"python": platform.python_version()}
        | {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "safetensors")},
        "answers": answers(arguments.output),
    }
    write_json(arguments.output / "training_log.json", log)
    for prompt, answer in log["answers"].items():
        console.print(f"> {prompt}", style="bold", markup=False)
        console.print(answer, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
