"""How models/tiny-qwen3-chat is made: conversations written for it, and what is different from tiny-gpt2's training."""
