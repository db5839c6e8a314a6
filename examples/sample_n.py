"""Draw four continuations of one prompt; the prompt is computed once.

Usage: python examples/sample_n.py [MODEL]
"""

from __future__ import annotations

import sys

from rose_backend import LLM, SamplingParams

PROMPT = "The youngest brother looked at the"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "models/tiny-gpt2"
    params = SamplingParams(n=4, seed=7, temperature=0.9, top_p=0.95, max_tokens=24)
    with LLM(model) as llm:
        output = llm.generate(PROMPT, params)[0]
        for completion in output.outputs:
            print(f"{completion.index}: {PROMPT}{completion.text}")
        print(
            f"prompt tokens: {len(output.prompt_token_ids)}, computed: {llm.stats.prompt_tokens_computed}, "
            f"blocks cloned: {llm.stats.clones}"
        )


if __name__ == "__main__":
    main()
