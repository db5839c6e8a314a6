"""The start and the end of a step on the device: write its inputs from the requests' state; update it with its tokens.

A row of a decode step is a request that gets one token; a row of a mixed step may compute part of a prompt, or drafts.
The state of each request is in a slot of larger tensors, and ``slots`` maps rows to slots. Rows without a request come
last and have slot -1. Kernels compute nothing from their inputs and change no slot for them, so one CUDA graph serves
any number of requests up to its number of rows.
"""

from __future__ import annotations

import torch

from rose_backend.errors import ShapeError
from rose_backend.kernels.arguments import (
    NOT_DRAWN,
    DraftedRows,
    MixedRows,
    StateGroup,
    StepGroup,
    StepGroups,
    StepInputs,
    StepState,
    check_tensors,
)

NO_SLOT = -1
"""The request slot, and the KV slot, of a row without a request."""


def begin_decode_step(
    slots: torch.Tensor,  # [R] int64
    state: StepState,
    inputs: StepInputs,  # written, the first R rows
    groups: StepGroups,  # written, the first R rows, but for the state's block tables
    *,
    padding_slot: int,
) -> None:
    """Write the inputs of a step that computes the last token of each row.

    From block tables, only the columns that the step may read are copied, with the null block where a sliding window
    has passed; rows without a request become 0. For states, the block of each row is copied.

    Args:
        slots: request slot of each row; -1 after the last request.
        padding_slot: value of ``request_slots`` for rows without a request.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    num_rows = len(slots)
    check_tensors(
        slots=(slots, "R", torch.int64),
        num_computed_tokens=(state.num_computed_tokens, "MR", torch.int32),
        last_tokens=(state.last_tokens, "MR", torch.int64),
        input_ids=(inputs.input_ids[:num_rows], "R", torch.int32),
        positions=(inputs.positions[:num_rows], "R", torch.int64),
        seq_lens=(inputs.seq_lens[:num_rows], "R", torch.int32),
        query_start_loc=(inputs.query_start_loc[1 : num_rows + 1], "R", torch.int32),
        is_padding=(inputs.is_padding[:num_rows], "R", torch.bool),
        request_slots=(inputs.request_slots[:num_rows], "R", torch.int32),
    )
    for index, group in enumerate(groups.groups):
        _check_group(slots, state, group, index)
    if slots.is_cuda:
        from rose_backend.kernels.decode_step.steps import begin_decode_step as launch

        return launch(slots, state, inputs, groups, padding_slot)
    is_real = slots != NO_SLOT
    known = slots.clamp(min=0)
    computed = torch.where(is_real, state.num_computed_tokens[known], -1)
    inputs.seq_lens[:num_rows] = computed + 1
    inputs.positions[:num_rows] = computed.clamp(min=0)
    inputs.input_ids[:num_rows] = torch.where(is_real, state.last_tokens[known], 0)
    inputs.query_start_loc[1 : num_rows + 1] = is_real.cumsum(0)
    inputs.is_padding[:num_rows] = ~is_real
    inputs.request_slots[:num_rows] = torch.where(is_real, slots, padding_slot)
    for group in groups.groups:
        _begin_group(slots, computed, group)
    return None


def _check_group(slots: torch.Tensor, state: StepState, group: StepGroup | StateGroup, index: int) -> None:
    num_rows = len(slots)
    tensors = {"state_table": (group.state_table, "MR MB", torch.int32)}
    if isinstance(group, StateGroup):
        tensors |= {
            "state_blocks": (group.state_blocks[:num_rows], "R", torch.int32),
            "last_columns": (group.last_columns, "MR", torch.int32),
        }
    else:
        tensors |= {
            "block_table": (group.block_table[:num_rows], "R MB", torch.int32),
            "slot_mapping": (group.slot_mapping[:num_rows], "R", torch.int64),
            "num_computed_tokens": (group.num_computed_tokens[:num_rows], "R", torch.int32),
        }
    check_tensors(
        slots=(slots, "R"),
        last_tokens=(state.last_tokens, "MR"),
        **{f"{name} of group {index}": spec for name, spec in tensors.items()},
    )


def _begin_group(slots: torch.Tensor, computed: torch.Tensor, group: StepGroup | StateGroup) -> None:
    num_rows = len(slots)
    is_real = slots != NO_SLOT
    positions = computed.clamp(min=0).long()
    column = positions // group.block_size
    table = group.state_table[slots.clamp(min=0)]
    block = table.gather(1, column[:, None]).squeeze(1).long()
    if isinstance(group, StateGroup):
        group.state_blocks[:num_rows] = torch.where(is_real, block, 0)
        group.last_columns[slots[is_real]] = column[is_real].int()
        return
    group.num_computed_tokens[:num_rows] = computed
    is_read = torch.arange(table.shape[1], device=slots.device) <= column[:, None]
    keep = group.block_table[:num_rows]
    keep.copy_(torch.where(is_real[:, None], torch.where(is_read, table, keep), 0))
    kv_slot = block * group.block_size + positions % group.block_size
    group.slot_mapping[:num_rows] = torch.where(is_real, kv_slot, NO_SLOT)


def begin_mixed_step(
    rows: MixedRows,
    state: StepState,
    inputs: StepInputs,  # written, the first R rows and T tokens
    groups: StepGroups,  # written, but for the state's block tables and computed tokens
    computed_tokens: torch.Tensor,  # [2, MR] int32  written, the first R rows
    *,
    num_tokens: int,
    max_query_len: int,
    padding_slot: int,
) -> None:
    """Write the inputs of a step with several tokens in a row: parts of prompts, or a last token and drafts after it.

    Tokens past those of the rows are padding: they get no place in the KV cache, and keep what ids and positions are
    there. Block tables are written as by ``begin_decode_step``, and for as many further tokens as there are drafts: a
    drafter with its own K/V continues after the step's tokens. Groups with states are not served.

    Args:
        state: with drafts, a row that is no prompt has up to all of its slot's after its last token.
        computed_tokens: of rows that decode attention takes, which have one token, or as many as one with all drafts;
            and of rows with more of them; -1 in all other rows.
        num_tokens: T, with padding.
        max_query_len: of a row, at least.
        padding_slot: in ``request_slots`` of rows without a request.

    Raises:
        ShapeError: shapes or dtypes disagree, or a group has states.
    """
    _check_mixed(rows, state, inputs, groups, computed_tokens, num_tokens)
    num_rows = len(rows.slots)
    if rows.slots.is_cuda:
        from rose_backend.kernels.decode_step.steps import begin_mixed_step as launch

        return launch(rows, state, inputs, groups, computed_tokens, (num_tokens, max_query_len), padding_slot)
    is_real, known = rows.slots != NO_SLOT, rows.slots.clamp(min=0)
    starts, counts = rows.query_start_loc[:-1].long(), rows.query_start_loc.diff()
    computed = torch.where(is_real, state.num_computed_tokens[known], 0)
    inputs.seq_lens[:num_rows] = computed + counts
    inputs.query_start_loc[: num_rows + 1] = rows.query_start_loc
    inputs.request_slots[:num_rows] = torch.where(is_real, rows.slots, padding_slot)
    drafts = state.draft_tokens
    num_drafts = 0 if drafts is None else drafts.shape[1]
    is_decode = counts <= num_drafts + 1
    computed_tokens[0, :num_rows] = torch.where(is_real & (counts > 0) & is_decode, computed, -1)
    computed_tokens[1, :num_rows] = torch.where(is_real & ~is_decode, computed, -1)
    of_token = torch.repeat_interleave(torch.arange(num_rows), counts)
    num_real = len(of_token)
    offsets = torch.arange(num_real) - starts[of_token]
    positions = computed[of_token] + offsets
    slots = known[of_token]
    decoded, from_prompt = state.last_tokens[slots], state.token_ids[slots, positions]
    if drafts is not None:
        is_draft = (offsets > 0) & (offsets <= num_drafts)
        decoded[is_draft] = drafts[slots[is_draft], offsets[is_draft] - 1]
    inputs.input_ids[:num_real] = torch.where(rows.is_prompt[of_token] != 0, from_prompt, decoded)
    inputs.positions[:num_real] = positions
    inputs.is_padding[:num_tokens] = torch.arange(num_tokens) >= num_real
    for group in _without_states(groups):
        last_column = (computed + counts + num_drafts - 1).clamp(min=0) // group.block_size
        is_read = torch.arange(group.state_table.shape[1]) <= last_column[:, None]
        keep = group.block_table[:num_rows]
        keep.copy_(torch.where(is_real[:, None], torch.where(is_read, group.state_table[known], keep), 0))
        block = group.state_table[slots, positions // group.block_size].long()
        group.slot_mapping[:num_real] = block * group.block_size + positions % group.block_size
        group.slot_mapping[num_real:num_tokens] = NO_SLOT
    return None


def _without_states(groups: StepGroups) -> list[StepGroup]:
    """Return all groups, none of which may have states.

    Raises:
        ShapeError: one has.
    """
    attention = [group for group in groups.groups if isinstance(group, StepGroup)]
    if len(attention) < len(groups.groups):
        raise ShapeError("groups: a step with prompts takes none with states")
    return attention


def _check_mixed(
    rows: MixedRows,
    state: StepState,
    inputs: StepInputs,
    groups: StepGroups,
    computed_tokens: torch.Tensor,
    num_tokens: int,
) -> None:
    num_rows = len(rows.slots)
    check_tensors(
        slots=(rows.slots, "R", torch.int64),
        of_rows=(rows.query_start_loc[1:], "R", torch.int32),
        is_prompt=(rows.is_prompt, "R", torch.int32),
        computed_tokens=(computed_tokens[:, :num_rows], "2 R", torch.int32),
        num_computed_tokens=(state.num_computed_tokens, "MR", torch.int32),
        last_tokens=(state.last_tokens, "MR", torch.int64),
        token_ids=(state.token_ids, "MR S", torch.int32),
        input_ids=(inputs.input_ids[:num_tokens], "T", torch.int32),
        positions=(inputs.positions[:num_tokens], "T", torch.int64),
        is_padding=(inputs.is_padding[:num_tokens], "T", torch.bool),
        seq_lens=(inputs.seq_lens[:num_rows], "R", torch.int32),
        query_start_loc=(inputs.query_start_loc[1 : num_rows + 1], "R", torch.int32),
        request_slots=(inputs.request_slots[:num_rows], "R", torch.int32),
    )
    if state.draft_tokens is not None:
        check_tensors(
            last_tokens=(state.last_tokens, "MR"), draft_tokens=(state.draft_tokens, "MR N", torch.int64)
        )
    for index, group in enumerate(_without_states(groups)):
        check_tensors(
            slots=(rows.slots, "R"),
            is_padding=(inputs.is_padding[:num_tokens], "T"),
            last_tokens=(state.last_tokens, "MR"),
            **{
                f"state_table of group {index}": (group.state_table, "MR MB", torch.int32),
                f"block_table of group {index}": (group.block_table[:num_rows], "R MB", torch.int32),
                f"slot_mapping of group {index}": (group.slot_mapping[:num_tokens], "T", torch.int64),
            },
        )


def write_block_ids(
    writes: torch.Tensor,  # [2, N] int64
    groups: StepGroups,  # written, the state's block tables
) -> None:
    """Write block ids into the state's block tables, which are contiguous.

    Args:
        writes: places and blocks. A place is ``slot * width + column`` after the group's ``first_entries``; none comes
            twice.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    if writes.dim() != 2 or len(writes) != 2 or writes.dtype is not torch.int64:
        raise ShapeError(f"writes: expected torch.int64 [2, N], got {writes.dtype} {list(writes.shape)}")
    if writes.is_cuda:
        from rose_backend.kernels.decode_step.steps import write_block_ids as launch

        return launch(writes, groups)
    for group, first in zip(groups.groups, groups.first_entries, strict=True):
        is_here = (writes[0] >= first) & (writes[0] < first + group.state_table.numel())
        places, blocks = writes[:, is_here]
        group.state_table.view(-1).scatter_(0, places - first, blocks.int())
    return None


def end_step(
    slots: torch.Tensor,  # [R] int64
    tokens: torch.Tensor,  # [R] int64, [R, N] with num_sampled
    state: StepState,  # written, but for drafts
    rows: MixedRows | None = None,
    num_sampled: torch.Tensor | None = None,  # [R] int32
) -> None:
    """Append each row's new tokens to its request, and count the tokens that the step has computed.

    Args:
        slots: of each row; rows with -1 are left out.
        tokens: sampled by the step.
        rows: of a mixed step, R of them: rows that are not due get no token. None: each row has computed one token, or
            as many as it gets.
        num_sampled: of each row's N tokens, those that it gets, at least one: accepted drafts and one after them. What
            has been computed of other drafts does not count. None: one of one. Only without ``rows``.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    if num_sampled is None:
        tokens = tokens[..., None]
    elif rows is not None:
        raise ShapeError("num_sampled: expected None for a mixed step, got a tensor")
    _check_end(slots, tokens, state, rows, num_sampled)
    if slots.is_cuda:
        from rose_backend.kernels.decode_step.steps import end_step as launch

        return launch(slots, tokens, state, rows, num_sampled)
    is_real = slots != NO_SLOT
    num_new = torch.ones_like(slots, dtype=torch.int32) if num_sampled is None else num_sampled
    num_computed = num_new if rows is None else rows.query_start_loc.diff()
    state.num_computed_tokens[slots[is_real]] += num_computed[is_real]
    is_due = is_real if rows is None else is_real & (rows.is_due != 0)
    _append_tokens(slots[is_due], tokens[is_due], num_new[is_due], state)
    return None


def _check_end(
    slots: torch.Tensor,
    tokens: torch.Tensor,
    state: StepState,
    rows: MixedRows | None,
    num_sampled: torch.Tensor | None,
) -> None:
    check_tensors(
        slots=(slots, "R", torch.int64),
        tokens=(tokens, "R 1" if num_sampled is None else "R N", torch.int64),
        num_computed_tokens=(state.num_computed_tokens, "MR", torch.int32),
        last_tokens=(state.last_tokens, "MR", torch.int64),
        total_lens=(state.total_lens, "MR", torch.int32),
        token_ids=(state.token_ids, "MR S", torch.int32),
    )
    counts = state.output_counts
    if counts is not None:
        check_tensors(last_tokens=(state.last_tokens, "MR"), output_counts=(counts, "MR V", torch.int32))
    if num_sampled is not None:
        check_tensors(slots=(slots, "R"), num_sampled=(num_sampled, "R", torch.int32))
    if rows is not None:
        check_tensors(
            slots=(slots, "R"),
            of_rows=(rows.query_start_loc[1:], "R", torch.int32),
            is_due=(rows.is_due, "R", torch.int32),
        )


def _append_tokens(
    slots: torch.Tensor, tokens: torch.Tensor, num_new: torch.Tensor, state: StepState
) -> None:
    of_row = torch.repeat_interleave(torch.arange(len(slots)), num_new)
    places = torch.arange(len(of_row)) - (num_new.cumsum(0) - num_new)[of_row]
    appended, owners = tokens[of_row, places], slots[of_row]
    state.last_tokens[slots] = tokens[torch.arange(len(slots)), num_new.long() - 1]
    state.token_ids[owners, state.total_lens[owners].long() + places] = appended.int()
    state.total_lens[slots] += num_new
    if state.output_counts is not None:
        # The same token may come twice.
        ones = torch.ones_like(appended, dtype=torch.int32)
        state.output_counts.index_put_((owners, appended), ones, accumulate=True)


def advance_rows(
    token_ids: torch.Tensor,  # [R] int64
    input_ids: torch.Tensor,  # [R] int64  written
    num_computed_tokens: torch.Tensor,  # [R] int32  written
    positions: torch.Tensor,  # [R] int64  written
    draw_positions: torch.Tensor,  # [R] int64  written
    history: torch.Tensor,  # [N, MR] int64  written
    step_index: torch.Tensor,  # [1] int64  written
) -> None:
    """Make ``token_ids`` the next input and count every length up by one, but for padding rows.

    Also writes the tokens into row ``step_index % N`` of ``history``, which may be pinned host memory, and counts
    ``step_index`` up. Nothing here depends on a number that only the host knows: one captured launch serves every step.

    Args:
        num_computed_tokens: a negative value marks a padding row, whose lengths stay as they are.
        history: ``MR`` is at least ``R``; entries past ``R`` stay as they are.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    check_tensors(
        token_ids=(token_ids, "R", torch.int64),
        input_ids=(input_ids, "R", torch.int64),
        num_computed_tokens=(num_computed_tokens, "R", torch.int32),
        positions=(positions, "R", torch.int64),
        draw_positions=(draw_positions, "R", torch.int64),
        history=(history, "N MR", torch.int64),
        step_index=(step_index, "1", torch.int64),
    )
    if token_ids.is_cuda:
        from rose_backend.kernels.decode_step.steps import advance_rows as launch

        launch(token_ids, input_ids, num_computed_tokens, positions, draw_positions, history, step_index)
        return
    is_row = num_computed_tokens >= 0
    input_ids.copy_(token_ids)
    for lengths in (num_computed_tokens, positions, draw_positions):
        lengths += is_row
    history[int(step_index) % len(history), : len(token_ids)] = token_ids
    step_index += 1


def look_up_drafts(
    rows: DraftedRows,
    *,
    num_drafts: int,
    min_n: int,
    max_n: int,
) -> torch.Tensor:
    """Return what may follow each row's tokens, int64 ``[R, num_drafts]``, as vLLM's lookup of n-grams proposes it.

    It is what has followed the last occurrence of the longest n-gram, of ``min_n`` to ``max_n`` tokens, that the row's
    tokens end with. What is missing, all of it where nothing matches, is the newest token again.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    _check_drafted(rows)
    if rows.slots.is_cuda:
        from rose_backend.kernels.decode_step.drafts import look_up_drafts as launch

        return launch(rows, num_drafts, min_n, max_n)
    lengths = (rows.num_computed_tokens.long() + 1)[:, None]
    most = max(int(lengths.max()), 1) if len(lengths) else 1
    tokens = rows.token_ids[rows.slots, :most]
    # By where an n-gram ends: how many of its last tokens are also the row's last ones.
    ends = torch.arange(most + 1)
    goes_on = (ends > 0) & (ends < lengths)
    num_matched = torch.zeros_like(goes_on, dtype=torch.int64)
    for n in range(min(max_n, most)):
        own = tokens.gather(1, (lengths - 1 - n).clamp(min=0))
        goes_on[:, : n + 1] = False
        goes_on[:, n + 1 :] &= tokens[:, : most - n] == own
        num_matched += goes_on
    best = torch.where(num_matched >= min_n, (num_matched << 32) + ends, 0).amax(1, keepdim=True)
    starts = torch.where(best > 0, best % (1 << 32), lengths)
    places = starts + torch.arange(num_drafts)
    drafts = tokens.gather(1, places.clamp(max=most - 1)).long()
    newest = tokens.gather(1, (lengths - 1).clamp(min=0)).long()
    return torch.where(places < lengths, drafts, newest)


def accept_drafts(
    drawn: torch.Tensor,  # [R, N + 1] int64
    drafts: torch.Tensor,  # [R, N] int64
    rows: DraftedRows,  # written, but for slots
    history: torch.Tensor,  # [steps, C, MR] int64  written
    step_index: torch.Tensor,  # [1] int64  written
) -> None:
    """Append to each row the drafts that equal what was drawn in their place, and the token drawn after them.

    The row's newest token is then the last of these, and its lengths count up by their number; but it never gets to
    more than the S tokens that it has room for. The tokens are also written into ``history[step_index % steps]``, a
    column each, which may be pinned host memory, with ``NOT_DRAWN`` after the last one; ``step_index`` counts up.

    Args:
        drawn: what follows the newest token, and each draft if all before it are right.
        drafts: negative ones are never right.
        history: ``C`` is at least ``N + 1``, ``MR`` at least ``R``; other entries stay as they are.

    Raises:
        ShapeError: shapes or dtypes disagree.
    """
    _check_drafted(rows)
    num_columns = drawn.shape[-1]
    check_tensors(slots=(rows.slots, "R"), drawn=(drawn, "R N", torch.int64))
    check_tensors(drawn=(drawn[:, 1:], "R N"), drafts=(drafts, "R N", torch.int64))
    check_tensors(history=(history, "N C MR", torch.int64), step_index=(step_index, "1", torch.int64))
    if drawn.is_cuda:
        from rose_backend.kernels.decode_step.drafts import accept_drafts as launch

        return launch(drawn, drafts, rows, history, step_index)
    is_right = (drafts == drawn[:, :-1]) & (drafts >= 0)
    num_new = 1 + is_right.int().cumprod(1).sum(1)
    is_new = torch.arange(num_columns) < num_new[:, None]
    newest = drawn.gather(1, num_new[:, None] - 1)[:, 0]
    computed, num_places = rows.num_computed_tokens, rows.token_ids.shape[1]
    is_row = computed >= 0
    places = computed.long()[:, None] + 1 + torch.arange(num_columns)
    is_kept = is_new & is_row[:, None] & (places < num_places)
    rows.token_ids[rows.slots[:, None].expand_as(places)[is_kept], places[is_kept]] = drawn[is_kept].int()
    rows.input_ids.copy_(newest)
    num_new = torch.minimum(num_new, num_places - 1 - computed.long()) * is_row
    for lengths in (rows.num_computed_tokens, rows.positions, rows.draw_positions):
        lengths += num_new.to(lengths.dtype)
    history[int(step_index) % len(history), :num_columns, : len(drawn)] = torch.where(
        is_new, drawn, NOT_DRAWN
    ).t()
    step_index += 1
    return None


def _check_drafted(rows: DraftedRows) -> None:
    check_tensors(
        slots=(rows.slots, "R", torch.int64),
        input_ids=(rows.input_ids, "R", torch.int64),
        num_computed_tokens=(rows.num_computed_tokens, "R", torch.int32),
        positions=(rows.positions, "R", torch.int64),
        draw_positions=(rows.draw_positions, "R", torch.int64),
    )
    check_tensors(token_ids=(rows.token_ids, "MR S", torch.int32))
