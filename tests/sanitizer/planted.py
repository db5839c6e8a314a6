"""One mistake for each tool to find."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store_past_the_end(out_ptr, num_elements):
    tl.store(out_ptr + num_elements + tl.arange(0, 1), tl.full([1], 1, tl.int32))


@triton.jit
def _race_for_a_word(out_ptr):
    # Four warps store different numbers to one word of shared memory and read it, with nothing between them.
    lanes = tl.arange(0, 128)
    seen = tl.inline_asm_elementwise(
        "{ .shared .align 4 .b32 word; st.shared.b32 [word], $1; ld.shared.b32 $0, [word]; }",
        "=r,r",
        [lanes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr + lanes, seen)


@triton.jit
def _copy(in_ptr, out_ptr):
    lanes = tl.arange(0, 128)
    tl.store(out_ptr + lanes, tl.load(in_ptr + lanes))


def plant(tool: str) -> None:
    """Make the mistake that ``tool`` has to report."""
    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    if tool == "memcheck":
        _store_past_the_end[(1,)](out, out.numel())
    elif tool == "racecheck":
        _race_for_a_word[(1,)](out, num_warps=4)
    else:
        _copy[(1,)](torch.empty(128, dtype=torch.int32, device="cuda"), out, num_warps=4)
    torch.cuda.synchronize()
