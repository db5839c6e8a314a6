"""Where Rose's manager answers otherwise than vLLM's, on purpose: one entry each, measured on both sides by a scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

from rose_backend.conformance.block_manager.host import Host
from rose_backend.conformance.block_manager.managers import STATE

MakeHost = Callable[..., Host]
PROMPT = list(range(40))


@dataclass(frozen=True)
class Difference:
    """One question to which the managers give different answers."""

    question: str
    observe: Callable[[MakeHost], Any]
    """Plays the scene and returns the answer."""
    rose: Any
    stock: Any
    why: str


# The scenes: each plays around a fresh host and returns the manager's answer.


def hits_after(first: list[int], second: list[int]) -> Callable[[MakeHost], int]:
    def observe(make_host: MakeHost) -> int:
        host = make_host()
        host.started("first", first)
        return host.hits(host.new_request("second", second))

    return observe


def hits_of_a_follow_up(make_host: MakeHost) -> int:
    host = make_host()
    first = host.started("first", PROMPT)
    host.decode(first, steps=5)
    host.free(first)
    # The last generated token was never an input: 45 of 46 tokens have K/V.
    return host.hits(host.new_request("second", [*first.all_token_ids, 900, 901]))


def started_with_states(make_host: MakeHost) -> tuple[Host, Request]:
    """Return a host of layers with states, and a request there that runs."""
    host = make_host(30, windows=(STATE,))
    request = host.new_request("first", PROMPT)
    # vLLM's scheduler ends chunks of prompts where its manager can keep a state: at a block's border.
    host.run(request, num_tokens=32)
    host.start_step()
    host.append(request, 8)
    host.finish_step()
    host.decode(request, steps=3)
    return host, request


def hits_of_states(make_host: MakeHost) -> int:
    host, _ = started_with_states(make_host)
    return host.hits(host.new_request("second", [*PROMPT, 900, 901]))


def hits_in_the_same_step(make_host: MakeHost) -> int:
    host = make_host()
    host.start_step()
    host.admit(host.new_request("first", PROMPT))
    hits = host.hits(host.new_request("second", PROMPT))
    host.finish_step()
    return hits


def hits_of_a_block_filled_in_this_step(make_host: MakeHost) -> int:
    host = make_host()
    first = host.started("first", PROMPT[:15])
    host.start_step()
    host.append(first)
    hits = host.hits(host.new_request("second", [*first.all_token_ids, 900]))
    host.finish_step()
    return hits


def hits_of_what_never_ran(make_host: MakeHost) -> int:
    host = make_host()
    first = host.new_request("first", PROMPT)
    host.start_step()
    host.admit(first)
    host.free(first)
    host.finish_step()
    return host.hits(host.new_request("second", PROMPT))


def computed_after_resumption(make_host: MakeHost) -> int:
    host = make_host()
    request = host.started("a", PROMPT)
    host.decode(request, steps=5)
    host.preempt(request)
    return request.num_tokens - host.hits(request)


def copies(make_host: MakeHost) -> int:
    host = make_host()
    host.started("first", PROMPT)
    host.start_step()
    host.admit(host.new_request("second", PROMPT))
    return len(host.finish_step())


def reported_at_admission(make_host: MakeHost) -> int:
    host = make_host()
    host.started("first", PROMPT)
    allocated = host.run(host.new_request("second", [*PROMPT[:32], *range(900, 920)]))
    return len(allocated.get_block_ids()[0])


def findable_while_running(make_host: MakeHost) -> int:
    host = make_host()
    request = host.started("a", PROMPT)
    return int(host.manager.estimate_cached_tokens(request))


def hits_left_beside_duplicates(make_host: MakeHost) -> list[int]:
    host = make_host()
    prompts = [list(range(start, start + 32)) for start in (100, 300)]
    # Two different prompts, then the first one twice more without looking it up.
    for name, prompt in (("a", 0), ("b", 1), ("c", 0), ("d", 0)):
        request = host.started(name, prompts[prompt], skip_reading=name in "cd")
        host.free(request)
    host.run(host.new_request("intruder", [7] * 128))  # 8 of 12 blocks
    return [host.hits(host.new_request(f"probe{prompt[0]}", [*prompt, 1])) for prompt in prompts]


def requests_at_once(make_host: MakeHost) -> int:
    host = make_host(max_num_seqs=4)
    requests = [host.new_request(str(index), [index] * 10) for index in range(6)]
    return sum(host.run(request) is not None for request in requests)


def allocate_nothing(make_host: MakeHost) -> str:
    host = make_host()
    try:
        blocks = host.manager.allocate_slots(host.new_request("a", PROMPT), 0)
    except ValueError as error:
        return type(error).__name__
    host.manager.free(host.new_request("a", PROMPT))
    return f"{len(blocks.get_block_ids()[0])} blocks"


def handles_to_free_later(make_host: MakeHost) -> int:
    host = make_host()
    request = host.started("a", PROMPT)
    handles = host.pop_for_later_free(request)
    host.manager.block_pool.free_blocks(reversed(handles))
    return len(handles)


def hashed_blocks(make_host: MakeHost) -> int:
    host = make_host()
    host.started("a", PROMPT)
    return sum(block.block_hash is not None for block in host.manager.get_blocks("a").blocks[0])


def pool_below_one_sequence(make_host: MakeHost) -> str:
    try:
        make_host(8, max_model_len=128)
    except Exception as error:
        return type(error).__name__
    return "built"


DIFFERENCES = (
    Difference(
        "hits: 40 tokens cached, the prompt shares 25",
        hits_after(PROMPT, [*PROMPT[:25], 900, 901]),
        25,
        16,
        "Rose's hits end at any token; vLLM's at full blocks",
    ),
    Difference(
        "hits: an equal prompt of 40",
        hits_after(PROMPT, PROMPT),
        39,
        32,
        "Only the last token's logits are missing; vLLM computes its whole block again",
    ),
    Difference(
        "hits: an equal prompt of 32, two full blocks",
        hits_after(PROMPT[:32], PROMPT[:32]),
        31,
        16,
        "The last token costs vLLM a full block",
    ),
    Difference(
        "hits: an equal prompt shorter than a block",
        hits_after(PROMPT[:10], PROMPT[:10]),
        9,
        0,
        "Part-filled blocks are findable in Rose",
    ),
    Difference(
        "hits: a follow-up of 40 prompt and 6 generated tokens",
        hits_of_a_follow_up,
        45,
        32,
        "Conversations continue at the token",
    ),
    Difference(
        "hits: layers with states, the second prompt that begins with 40 tokens",
        hits_of_states,
        0,
        32,
        "Rose keeps states where prompts part that share 64 tokens or more, at any token, and where one ends; vLLM "
        "wherever a chunk ends at a block's border",
    ),
    Difference(
        "hits: an equal prompt admitted in the same step",
        hits_in_the_same_step,
        0,
        32,
        "Rose publishes once the step that writes is over, since a copy runs before the step's writes; vLLM shares "
        "full blocks that the same step will write. A loss for Rose when equal prompts come together",
    ),
    Difference(
        "hits: a block of 16 whose last token a running request computes in this step",
        hits_of_a_block_filled_in_this_step,
        15,
        16,
        "Rose counts what earlier steps wrote",
    ),
    Difference(
        "hits: a request freed before its step ran",
        hits_of_what_never_ran,
        0,
        32,
        "Rose publishes nothing that was not computed",
    ),
    Difference(
        "tokens to compute when a request of 46 tokens resumes after preemption",
        computed_after_resumption,
        1,
        14,
        "Part-filled blocks are findable in Rose",
    ),
    Difference(
        "block copies: an equal prompt while the first runs",
        copies,
        1,
        0,
        "A hit inside a block that another request appends to is read from a private copy",
    ),
    Difference(
        "blocks returned at admission: 2 hit, 2 new",
        reported_at_admission,
        4,
        2,
        "vLLM's scheduler sends a newcomer's whole table either way (get_blocks); Rose answers with it at once",
    ),
    Difference(
        "estimate_cached_tokens: 40 computed",
        findable_while_running,
        40,
        32,
        "Part-filled blocks are findable in Rose",
    ),
    Difference(
        "hits left of two prompts, one computed three times, after 8 of 12 blocks were taken",
        hits_left_beside_duplicates,
        [32, 32],
        [32, 0],
        "Rose keeps equal content once; vLLM keeps every copy until it is evicted",
    ),
    Difference(
        "requests that hold blocks at once, max_num_seqs 4",
        requests_at_once,
        4,
        6,
        "Rose's tables are rows of one array; the scheduler never admits more",
    ),
    Difference(
        "allocate_slots of no tokens",
        allocate_nothing,
        "0 blocks",
        "ValueError",
        "The scheduler asks for no tokens only when it adopts external ones, which are refused at start-up",
    ),
    Difference(
        "handles of pop_blocks_for_free: 3 blocks",
        handles_to_free_later,
        1,
        3,
        "Rose frees a row, not blocks; vLLM's scheduler only hands the list back",
    ),
    Difference(
        "block_hash: 3 blocks, 2 of them full",
        hashed_blocks,
        0,
        2,
        "KV connectors read it at admission, for blocks that were found; Rose publishes what a request computes later",
    ),
    Difference(
        "a pool smaller than one sequence of max_model_len",
        pool_below_one_sequence,
        "ConfigError",
        "built",
        "Rose refuses at start-up what could never be served; vLLM checks before it builds the manager",
    ),
)
