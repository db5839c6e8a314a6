"""Share a prefix to the token: a second prompt reuses part of a block, and costs one copy of it.

Usage: python examples/share_prefix.py [MODEL]
"""

from __future__ import annotations

import sys

from rose_backend import LLM, SamplingParams

SYSTEM = "You are a gardener who has tended the same roses for forty years, and you answer with a story. "
QUESTIONS = ["When should I water them?", "When should I cut them back?"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "models/tiny-gpt2"
    params = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(model, block_size=128) as llm:
        for question in QUESTIONS:
            clones_before = llm.stats.clones
            output = llm.generate(SYSTEM + question, params)[0]
            print(f"{question}{output.outputs[0].text}")
            print(
                f"  prompt tokens: {len(output.prompt_token_ids)}, cached: {output.num_cached_tokens}, "
                f"blocks cloned: {llm.stats.clones - clones_before}"
            )


if __name__ == "__main__":
    main()
