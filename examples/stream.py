"""Stream two texts at the same time from one engine, with asyncio.

Usage: python examples/stream.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from rose_backend import AsyncEngine, SamplingParams


async def tell(engine: AsyncEngine, name: str, prompt: str) -> str:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)
    text = ""
    async for output in engine.generate(prompt, params):
        delta = output.outputs[0].delta_text
        text += delta
        print(f"{name}: {delta!r}", flush=True)
    return prompt + text


async def main() -> None:
    engine = AsyncEngine(sys.argv[1] if len(sys.argv) > 1 else "models/tiny-gpt2")
    try:
        texts = await asyncio.gather(
            tell(engine, "left", "The old woman opened the door and"),
            tell(engine, "right", "The wolf went into the wood and"),
        )
    finally:
        await engine.shutdown()
    for text in texts:
        print(f"\n{text}")


if __name__ == "__main__":
    asyncio.run(main())
