"""The scenes behind the table of differences: each plays one around a fresh host and returns the manager's answer."""

from __future__ import annotations

from collections.abc import Callable

from tests.conformance.block_manager.host import Host

MakeHost = Callable[..., Host]
PROMPT = list(range(40))


def hits_after(first: list[int], second: list[int]) -> Callable[[MakeHost], int]:
    def observe(make_host: MakeHost) -> int:
        host = make_host()
        host.run(host.new_request("first", first))
        return host.hits(host.new_request("second", second))

    return observe


def hits_of_a_follow_up(make_host: MakeHost) -> int:
    host = make_host()
    first = host.new_request("first", PROMPT)
    host.run(first)
    host.decode(first, steps=5)
    host.free(first)
    # The last generated token was never an input: 45 of 46 tokens have K/V.
    return host.hits(host.new_request("second", [*first.all_token_ids, 900, 901]))


def hits_in_the_same_step(make_host: MakeHost) -> int:
    host = make_host()
    host.start_step()
    host.admit(host.new_request("first", PROMPT))
    hits = host.hits(host.new_request("second", PROMPT))
    host.finish_step()
    return hits


def hits_of_a_block_filled_in_this_step(make_host: MakeHost) -> int:
    host = make_host()
    first = host.new_request("first", PROMPT[:15])
    host.run(first)
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
    request = host.new_request("a", PROMPT)
    host.run(request)
    host.decode(request, steps=5)
    host.preempt(request)
    return request.num_tokens - host.hits(request)


def copies(make_host: MakeHost) -> int:
    host = make_host()
    host.run(host.new_request("first", PROMPT))
    host.start_step()
    host.admit(host.new_request("second", PROMPT))
    return len(host.finish_step())


def reported_at_admission(make_host: MakeHost) -> int:
    host = make_host()
    host.run(host.new_request("first", PROMPT))
    allocated = host.run(host.new_request("second", [*PROMPT[:32], *range(900, 920)]))
    return len(allocated.get_block_ids()[0])


def findable_while_running(make_host: MakeHost) -> int:
    host = make_host()
    request = host.new_request("a", PROMPT)
    host.run(request)
    return int(host.manager.estimate_cached_tokens(request))


def hits_left_beside_duplicates(make_host: MakeHost) -> list[int]:
    host = make_host()
    prompts = [list(range(start, start + 32)) for start in (100, 300)]
    # Two different prompts, then the first one twice more without looking it up.
    for name, prompt in (("a", 0), ("b", 1), ("c", 0), ("d", 0)):
        request = host.new_request(name, prompts[prompt], skip_reading=name in "cd")
        host.run(request)
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
    request = host.new_request("a", PROMPT)
    host.run(request)
    handles = host.pop_for_later_free(request)
    host.manager.block_pool.free_blocks(reversed(handles))
    return len(handles)


def hashed_blocks(make_host: MakeHost) -> int:
    host = make_host()
    host.run(host.new_request("a", PROMPT))
    return sum(block.block_hash is not None for block in host.manager.get_blocks("a").blocks[0])


def pool_below_one_sequence(make_host: MakeHost) -> str:
    try:
        make_host(8, max_model_len=128)
    except Exception as error:
        return type(error).__name__
    return "built"
