"""GPT-2's head and the choice of the next token, in one and one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from benchmarks.kernel_cases import peers
from benchmarks.kernel_cases.case import ROSE, Contest, KernelCase, Launches
from benchmarks.kernel_cases.sampler import FLASHINFER, VOCAB_SIZE, flashinfer_sample, make_params
from rose_backend.kernels import lm_head_sample, sample

WIDTH = 768
# cuBLAS is slow where rows of logits are not aligned: as in vLLM, peers get a vocabulary padded to a multiple of this.
PADDING = 64
UNFUSED, ARGMAX, DRAWN = "cuBLAS, Rose's sampler", "cuBLAS, torch.argmax", "cuBLAS, flashinfer"


def head_case(num_rows: int, *, greedy: bool) -> KernelCase:
    """Tokens of rows that all take the most likely one, or all draw at temperature 1."""
    filters = {"temperature": 0.0} if greedy else {}

    def make(num_sets: int) -> Contest:
        params = make_params(num_rows, **filters)
        padded = -(-VOCAB_SIZE // PADDING) * PADDING
        sets = [
            (
                torch.randn(num_rows, WIDTH, dtype=torch.float16, device="cuda"),
                torch.randn(padded, WIDTH, dtype=torch.float16, device="cuda") / 10,
            )
            for _ in range(num_sets)
        ]

        def rose(hidden: torch.Tensor, head: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: lm_head_sample(
                hidden, head, temperature=params.temperature, seed=params.seed, position=params.position
            )

        def after_cublas(choose: Callable[[torch.Tensor], torch.Tensor]) -> Launches:
            def launch(hidden: torch.Tensor, head: torch.Tensor) -> Callable[[], torch.Tensor]:
                return lambda: choose(F.linear(hidden, head)[:, :VOCAB_SIZE].float())

            return [launch(hidden, head) for hidden, head in sets]

        sides: dict[str, Launches] = {ROSE: [rose(hidden, head[:VOCAB_SIZE]) for hidden, head in sets]}
        sides[UNFUSED] = after_cublas(lambda logits: sample(logits, params).token_ids)
        if greedy:
            sides[ARGMAX] = after_cublas(lambda logits: logits.argmax(-1))
        else:
            modules = peers.load(FLASHINFER, "flashinfer.sampling")
            if modules is not None:
                sides[DRAWN] = after_cublas(flashinfer_sample(modules[0], params, filters))
        return Contest(sides, observe=observe, complaint=complaint)

    def observe(side: str, tokens: torch.Tensor) -> Sequence[torch.Tensor]:
        # Another generator's draws cannot be compared; the tests of lm_head_sample have the distribution.
        return (tokens,) if side != DRAWN else ()

    def complaint(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> str | None:
        if not theirs:
            return None
        # Products summed up in another order may round to another side of a tie.
        allowed = 0 if num_rows == 1 else max(1, num_rows // 20)
        differing = (ours[0] != theirs[0]).sum().item()
        return None if differing <= allowed else f"{differing} of {num_rows} tokens differ from Rose's"

    num_bytes = (VOCAB_SIZE + num_rows) * WIDTH * 2
    kind = "greedy" if greedy else "no filter"
    flops = 2 * num_rows * VOCAB_SIZE * WIDTH
    return KernelCase(f"head and sample B={num_rows} {kind}", num_bytes, make, flops=flops)


def cases() -> Iterator[KernelCase]:
    """Yield the cases that the table shows."""
    for greedy in (True, False):
        for num_rows in (1, 8, 32, 128, 256):
            yield head_case(num_rows, greedy=greedy)
