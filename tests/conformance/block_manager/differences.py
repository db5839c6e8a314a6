"""Where Rose's manager answers otherwise than vLLM's, on purpose: one entry each, measured on both sides by a test.

``python -m tests.conformance.block_manager`` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.conformance.block_manager import scenes


@dataclass(frozen=True)
class Difference:
    """One question to which the managers give different answers."""

    question: str
    observe: Callable[[scenes.MakeHost], Any]
    """Plays the scene and returns the answer."""
    rose: Any
    stock: Any
    why: str


DIFFERENCES = (
    Difference(
        "hits: 40 tokens cached, the prompt shares 25",
        scenes.hits_after(scenes.PROMPT, [*scenes.PROMPT[:25], 900, 901]),
        25,
        16,
        "Rose's hits end at any token; vLLM's at full blocks",
    ),
    Difference(
        "hits: an equal prompt of 40",
        scenes.hits_after(scenes.PROMPT, scenes.PROMPT),
        39,
        32,
        "Only the last token's logits are missing; vLLM computes its whole block again",
    ),
    Difference(
        "hits: an equal prompt of 32, two full blocks",
        scenes.hits_after(scenes.PROMPT[:32], scenes.PROMPT[:32]),
        31,
        16,
        "As above: the last token costs vLLM a full block",
    ),
    Difference(
        "hits: an equal prompt shorter than a block",
        scenes.hits_after(scenes.PROMPT[:10], scenes.PROMPT[:10]),
        9,
        0,
        "Part-filled blocks are findable in Rose",
    ),
    Difference(
        "hits: a follow-up of 40 prompt and 6 generated tokens",
        scenes.hits_of_a_follow_up,
        45,
        32,
        "Conversations continue at the token",
    ),
    Difference(
        "hits: an equal prompt admitted in the same step",
        scenes.hits_in_the_same_step,
        0,
        32,
        "Rose publishes once the step that writes is over, since a copy runs before the step's writes; vLLM shares "
        "full blocks that the same step will write. A loss for Rose when equal prompts come together",
    ),
    Difference(
        "hits: a block of 16 whose last token a running request computes in this step",
        scenes.hits_of_a_block_filled_in_this_step,
        15,
        16,
        "As above: Rose counts what earlier steps wrote",
    ),
    Difference(
        "hits: a request freed before its step ran",
        scenes.hits_of_what_never_ran,
        0,
        32,
        "Rose publishes nothing that was not computed",
    ),
    Difference(
        "tokens to compute when a request of 46 tokens resumes after preemption",
        scenes.computed_after_resumption,
        1,
        14,
        "Part-filled blocks are findable in Rose",
    ),
    Difference(
        "block copies: an equal prompt while the first runs",
        scenes.copies,
        1,
        0,
        "A hit inside a block that another request appends to is read from a private copy",
    ),
    Difference(
        "blocks returned at admission: 2 hit, 2 new",
        scenes.reported_at_admission,
        4,
        2,
        "vLLM's scheduler sends a newcomer's whole table either way (get_blocks); Rose answers with it at once",
    ),
    Difference(
        "estimate_cached_tokens: 40 computed",
        scenes.findable_while_running,
        40,
        32,
        "Part-filled blocks are findable in Rose",
    ),
    Difference(
        "hits left of two prompts, one computed three times, after 8 of 12 blocks were taken",
        scenes.hits_left_beside_duplicates,
        [32, 32],
        [32, 0],
        "Rose keeps equal content once; vLLM keeps every copy until it is evicted",
    ),
    Difference(
        "requests that hold blocks at once, max_num_seqs 4",
        scenes.requests_at_once,
        4,
        6,
        "Rose's tables are rows of one array; the scheduler never admits more",
    ),
    Difference(
        "allocate_slots of no tokens",
        scenes.allocate_nothing,
        "0 blocks",
        "ValueError",
        "The scheduler asks for no tokens only when it adopts external ones, which are refused at start-up",
    ),
    Difference(
        "handles of pop_blocks_for_free: 3 blocks",
        scenes.handles_to_free_later,
        1,
        3,
        "Rose frees a row, not blocks; vLLM's scheduler only hands the list back",
    ),
    Difference(
        "block_hash: 3 blocks, 2 of them full",
        scenes.hashed_blocks,
        0,
        2,
        "KV connectors read it at admission, for blocks that were found; Rose publishes what a request computes later",
    ),
    Difference(
        "a pool smaller than one sequence of max_model_len",
        scenes.pool_below_one_sequence,
        "ConfigError",
        "built",
        "Rose refuses at start-up what could never be served; vLLM checks before it builds the manager",
    ),
)
