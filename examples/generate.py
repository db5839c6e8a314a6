"""Generate for a few prompts at once.

Usage: python examples/generate.py [MODEL]
"""

from __future__ import annotations

import sys

from rose_backend import LLM, SamplingParams

PROMPTS = ["Once upon a time there was a", "The king said to his daughter,", "In the middle of the forest"]


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "models/tiny-gpt2"
    params = SamplingParams(temperature=0.0, max_tokens=32)
    with LLM(model) as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
