"""What each of Rose's parts is worth inside vLLM: which sides of ``offline_compare`` to set against each other."""

from __future__ import annotations

HOST, STOCK = "rose-in-vllm", "vllm"

# The rest of the switches are vLLM's own options under another name.
PARTS = (
    "block_manager",
    "batched_scheduling",
    "fused_kv_append",
    "fused_mlp",
    "fused_add_layernorm",
    "fused_sampler",
    "mixed_graphs",
)

ONLY_ATTENTION = f"{HOST}, only attention"
ONLY_MANAGER = f"{HOST}, only attention and block_manager"

PART_SIDES = {
    ONLY_ATTENTION: list(PARTS),
    ONLY_MANAGER: [part for part in PARTS if part != "block_manager"],
    # The manager off would take the parts that need it along.
    **{f"{HOST}, {part} off": [part] for part in PARTS if part != "block_manager"},
}
"""Side -> parts that are switched off. Attention is what ``--attention-backend rose`` chooses: it is always on."""

PAIRS = {
    "attention": (STOCK, ONLY_ATTENTION),
    "block_manager": (ONLY_ATTENTION, ONLY_MANAGER),
    **{part: (f"{HOST}, {part} off", HOST) for part in PARTS if part != "block_manager"},
}
"""Part -> the side without and the side with it; they differ in nothing else."""
