"""One step on the device: inputs from the buffers of request slots, forward passes, next tokens.

Passes over prompts are CUDA graphs, padded up to the next shape that was captured: launching a pass over a few thousand
tokens one kernel at a time takes the host longer than the GPU needs to compute it. In a server a pass runs beside
decode steps, on a second stream (``SideStream``).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rose_backend.block_manager import BlockManager, ClonePlan
from rose_backend.block_manager.canary import CanaryPlanner
from rose_backend.config import EngineConfig, Switches
from rose_backend.engine.decode_runner import (
    Computed,
    DecodeBuffers,
    DecodeRunner,
    SamplingExtras,
    graph_widths,
    pack_logprobs,
    sampling_of_rows,
    sampling_tensors,
)
from rose_backend.engine.drafts import DraftedInputs, Drafts
from rose_backend.engine.head_drafts import HeadDrafts
from rose_backend.engine.progress import show_progress
from rose_backend.engine.prompt_logprobs import PendingReport, ReportedRows, report_prompts, take_rows
from rose_backend.engine.scheduler import Step
from rose_backend.engine.sequence_state import SAMPLING_FIELDS, Int32Array, SequenceState
from rose_backend.kernels import SamplingTensors, block_clone, sample, sample_unfused
from rose_backend.kernels.captured_graphs import (
    CapturedGraphs,
    Fields,
    FixedInputs,
    Inputs,
    SizedGraphs,
    download,
    upload,
)
from rose_backend.kernels.gpu_properties import Workspace, is_recording
from rose_backend.kernels.kv.canary import KVCanary
from rose_backend.layers.attention import AttentionMetadata, slots_of_rows
from rose_backend.models.base import CausalLM
from rose_backend.models.eagle3 import Eagle3Head

logger = logging.getLogger(__name__)

_NO_BLOCKS: Int32Array = np.zeros(0, np.int32)
MAX_CAPTURED_TOKENS = 16_384
"""Larger passes keep the GPU busy without a graph."""
_MIN_ROWS = 4
# Tokens per row that bound the rows of a pass. Unused rows cost the attention kernel empty programs, so there are
# passes for long chunks, and further ones for short chunks.
_LONG_CHUNK, _SHORT_CHUNK = 128, 16
_MAX_SHORT_CHUNK_TOKENS = 4096

Forward = Callable[
    [torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor, torch.Tensor, torch.Tensor | None],
    torch.Tensor,
]


def captures_graphs(config: Switches, device: str) -> bool:
    """Return whether decode steps are captured. The unfused sampler waits for the device, which cannot be captured."""
    return config.cuda_graph and config.fused_sampler and device == "cuda"


class PassShape(NamedTuple):
    """The size of a captured pass, and what attention is tuned for in it."""

    num_tokens: int
    num_rows: int
    mean_query_len: float


def pass_shapes(max_tokens: int) -> tuple[PassShape, ...]:
    """Return what graphs are captured for, in the order in which a pass tries them: fewest tokens, then fewest rows.

    Steps of a quarter of the next power of two, from 256 tokens on: padding is at most a fifth, a tenth on average.
    """
    limit = min(max_tokens, MAX_CAPTURED_TOKENS)
    widths = [64, 128]
    while widths[-1] < limit:
        widths.append(widths[-1] + max(1 << (widths[-1].bit_length() - 1) >> 2, 128))
    shapes = []
    for width in (*(width for width in widths if width < limit), limit):
        shapes.append(PassShape(width, max(width // _LONG_CHUNK, _MIN_ROWS), _LONG_CHUNK))
        if width <= _MAX_SHORT_CHUNK_TOKENS and width // _SHORT_CHUNK > shapes[-1].num_rows:
            shapes.append(PassShape(width, width // _SHORT_CHUNK, 2 * _SHORT_CHUNK))
    return tuple(shapes)


class PassInputs(NamedTuple):
    """What a pass without decodes reads, ``T`` tokens of ``R`` rows."""

    input_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    query_start_loc: Int32Array  # [R + 1]
    num_computed_tokens: Int32Array  # [R]
    block_table: Int32Array  # [R, at most MB]
    next_ids: NDArray[np.int64]  # [R], of the token after each row's last one; 0 if it is not known
    slots: NDArray[np.int64]  # [R], request slots
    lora_slots: NDArray[np.int64] | None = None  # [T], -1 for no adapter; None: no token has one


class PromptGraphs:
    """Captured forward passes and the fixed inputs and outputs that they share.

    Args:
        forward: given token ids, positions and metadata of a pass without decodes, then ``next_ids`` and ``slots`` of
            its rows (-1 for padding), and the ``lora_slots`` of its tokens, returns the hidden states of its requests'
            last tokens, ``[R, E]``, and waits for nothing.
        max_tokens: of a pass.
        table_width: blocks per sequence (MB).
        takes_adapters: capture passes with adapters, too.
    """

    def __init__(
        self,
        forward: Forward,
        max_tokens: int,
        table_width: int,
        device: torch.device,
        *,
        takes_adapters: bool = False,
    ) -> None:
        self._forward = forward
        self._shapes = pass_shapes(max_tokens)
        self._takes_adapters = takes_adapters
        self._graphs = CapturedGraphs[PassShape](self._compute)
        self._adapted_graphs = CapturedGraphs[PassShape](functools.partial(self._compute, has_adapters=True))
        self.hidden = torch.empty(0)
        """Where every pass leaves the hidden states of its rows' last tokens, ``[max_rows, E]``."""
        num_tokens = max(shape.num_tokens for shape in self._shapes)
        num_rows = max(shape.num_rows for shape in self._shapes)
        self._inputs = FixedInputs(
            {
                "input_ids": (np.int64, (num_tokens,)),
                "positions": (np.int64, (num_tokens,)),
                "query_start_loc": (np.int32, (num_rows + 1,)),
                "num_computed_tokens": (np.int32, (num_rows,)),
                "block_table": (np.int32, (num_rows, table_width)),
                "next_ids": (np.int64, (num_rows,)),
                "slots": (np.int64, (num_rows,)),
                **({"lora_slots": (np.int64, (num_tokens,))} if takes_adapters else {}),
            },
            device,
        )

    @torch.inference_mode()
    def capture(self, stream: torch.cuda.Stream | None) -> None:
        """Capture a pass of each shape; ``stream`` as in ``CapturedGraphs.capture``."""
        # All rows are padding: nothing is read or written for them.
        nothing, no_rows = np.empty(0, np.int64), np.empty((0, 0), np.int32)
        inputs = PassInputs(
            nothing, nothing, np.zeros(1, np.int32), no_rows.ravel(), no_rows, nothing, nothing
        )
        self._fill(self._shapes[-1].num_tokens, inputs)
        # One after the other they fit into the same memory.
        pool = None if is_recording() else torch.cuda.graph_pool_handle()
        for graphs in (self._graphs, *((self._adapted_graphs,) if self._takes_adapters else ())):
            graphs.capture(show_progress("capturing prompt passes", self._shapes[::-1]), pool, stream)

    def shape_for(self, num_tokens: int, num_rows: int) -> PassShape | None:
        """Return the smallest captured shape for ``num_tokens`` of ``num_rows`` prompts; None where none fits."""
        fitting = (
            shape for shape in self._shapes if shape.num_tokens >= num_tokens and shape.num_rows >= num_rows
        )
        return next(fitting, None)

    def run(self, inputs: PassInputs) -> torch.Tensor | None:
        """Replay the pass that fits; None where none does.

        Returns:
            Hidden states of each row's last token, ``[R, E]``, until the next call.
        """
        num_rows = len(inputs.num_computed_tokens)
        shape = self.shape_for(len(inputs.input_ids), num_rows)
        if shape is None:
            return None
        self._fill(shape.num_tokens, inputs)
        (self._graphs if inputs.lora_slots is None else self._adapted_graphs).run(shape)
        return self.hidden[:num_rows]

    def _fill(self, width: int, inputs: PassInputs) -> None:
        input_ids, positions, query_start_loc, num_computed_tokens, block_table, *of_rows, lora_slots = inputs
        next_ids, slots = of_rows
        host_bytes, fields = self._inputs.begin()
        num_tokens, num_rows = len(input_ids), len(num_computed_tokens)
        for name, values in (("input_ids", input_ids), ("positions", positions)):
            fields[name][:num_tokens] = values
            fields[name][num_tokens:width] = 0
        if self._takes_adapters:
            fields["lora_slots"][:num_tokens] = -1 if lora_slots is None else lora_slots
            fields["lora_slots"][num_tokens:width] = -1
        fields["query_start_loc"][: num_rows + 1] = query_start_loc
        fields["query_start_loc"][num_rows + 1 :] = num_tokens
        fields["num_computed_tokens"][:num_rows] = num_computed_tokens
        fields["num_computed_tokens"][num_rows:] = -1
        fields["block_table"][:num_rows, : block_table.shape[1]] = block_table
        for name, values, padding in (("next_ids", next_ids, 0), ("slots", slots, -1)):
            fields[name][:num_rows], fields[name][num_rows:] = values, padding
        self._inputs.send(host_bytes)

    def _compute(self, shape: PassShape, _: None = None, *, has_adapters: bool = False) -> None:
        num_tokens, num_rows, mean_query_len = shape
        inputs = self._inputs.tensors
        metadata = AttentionMetadata(
            query_start_loc=inputs["query_start_loc"][: num_rows + 1],
            num_computed_tokens=inputs["num_computed_tokens"][:num_rows],
            block_table=inputs["block_table"][:num_rows],
            slot_mapping=None,
            num_decodes=0,
            mean_query_len=mean_query_len,
            last_tokens_only=True,
        )
        hidden = self._forward(
            inputs["input_ids"][:num_tokens],
            inputs["positions"][:num_tokens],
            metadata,
            inputs["next_ids"][:num_rows],
            inputs["slots"][:num_rows],
            inputs["lora_slots"][:num_tokens] if has_adapters else None,
        )
        if not len(self.hidden):  # in the first pass, which is not captured
            max_rows = max(each.num_rows for each in self._shapes)
            self.hidden = hidden.new_empty((max_rows, hidden.shape[1]))
        self.hidden[:num_rows].copy_(hidden)


_DRAW_SIZES = (4, 16, 64)
"""Prompts that may end in one pass whose first tokens are drawn by a graph."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """What a pass computes of prompts."""

    slots: Int32Array  # [R]
    num_new_tokens: Int32Array  # [R]
    token_ids: Int32Array  # [T], slot after slot
    inputs: PassInputs


class Hidden(NamedTuple):
    """Outcome of a pass over ``Chunks``."""

    states: torch.Tensor  # [R, E], of each slot's last token
    is_captured: bool
    """The states are in ``PromptGraphs.hidden``, until the next pass."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The forward passes of a step that were started."""

    decode_slots: Int32Array  # [D], have drawn already
    decode_step: int
    decode_rows: NDArray[np.int64]  # [D]
    chunks: Chunks | None
    hidden: Hidden | None
    """None without chunks, and where ``ModelRunner.side`` computes them."""
    report: PendingReport | None = None
    """Log-probabilities of prompts; None where no prompt asks for them."""


_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Of engines that are gone. cuBLAS keeps scratch memory for each stream, and torch hands out 32 in turn: with a new one
for every engine, two that live at once could get the same."""


class SideStream:
    """The stream of passes over prompts that run beside decode steps, at most one at a time.

    A pass follows the one before, and what the current stream was given before ``mark``. Whatever touches what the pass
    touches has to follow ``join``: on the current stream, or on this one in a later pass.
    """

    def __init__(self, device: torch.device) -> None:
        idle = _idle_streams[device]
        self.stream = idle.pop() if idle else torch.cuda.Stream(device)
        self._device = device
        self._start, self._end = torch.cuda.Event(), torch.cuda.Event()
        self._hidden: Hidden | None = None

    def release(self) -> None:
        """Wait for the pass in flight, and leave the stream to a later engine."""
        self.stream.synchronize()
        _idle_streams[self._device].append(self.stream)

    def mark(self) -> None:
        """Let the next pass follow what the current stream was given so far."""
        self._start.record(torch.cuda.current_stream(self._device))

    def begin(self, compute: Callable[[], Hidden]) -> None:
        """Start the pass that ``compute`` enqueues."""
        assert self._hidden is None, "the pass before was not joined"
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self._start)
            self._hidden = compute()
            self._end.record(self.stream)

    def is_over(self) -> bool:
        """Return whether the device has computed the pass."""
        return self._end.query()

    def join(self) -> Hidden:
        """Let what the current stream is given from now on follow the pass; return its outcome."""
        torch.cuda.current_stream(self._device).wait_event(self._end)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "no pass was started"
        return hidden


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that ``ModelRunner.sample`` draws; they may not be there yet."""

    token_ids: torch.Tensor  # [S] int64, in host memory
    report: torch.Tensor | None
    """See ``LogprobWords``, in host memory; None when no request asked for more than a token."""


class ModelRunner:
    """Runs steps of one model over one KV pool. Nothing here waits for the device.

    Args:
        kv_cache: ``[L, 2, NB, BS, HKV, D]``, with one more layer for ``head``.
        head: makes the drafts; None: they are looked up, if there are any.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        manager: BlockManager,
        state: SequenceState,
        kv_cache: torch.Tensor,
        head: Eagle3Head | None = None,
    ) -> None:
        self._model = model
        self._manager = manager
        self._state = state
        self._kv_cache = kv_cache
        self._device = kv_cache.device
        self._block_size = config.block_size
        self._sample_tokens = sample if config.fused_sampler else sample_unfused
        self._writes_apart = not config.fused_kv_append
        vocab_size = int(model.config.vocab_size)
        self._extras = SamplingExtras(state, self._sample_tokens, vocab_size, self._device)
        widths = () if self._device.type == "cpu" else graph_widths(config.max_num_seqs)
        drafts: Drafts | None = None
        self.head_drafts: HeadDrafts | None = None
        """None where no head makes drafts."""
        if config.drafts is not None and head is not None:
            drafts = self.head_drafts = HeadDrafts(
                config.drafts, state, head, kv_cache, is_adaptive=config.adaptive_drafts
            )
        elif config.drafts is not None:
            drafts = Drafts(config.drafts, state, self._device, is_adaptive=config.adaptive_drafts)
        self.decoder = DecodeRunner(self._decode, self._extras, manager, state, self._device, widths, drafts)
        self.decoder.takes_adapters = config.enable_lora
        self.prompts: PromptGraphs | None = None
        self.first_draws: SizedGraphs | None = None
        self.side: SideStream | None = None
        """Computes the chunks of steps that ask for it; None on a CPU, which has no streams, and with ``kv_canary``."""
        self._canary: tuple[CanaryPlanner, KVCanary] | None = None
        if config.kv_canary != "off":
            caches = [each for layer in kv_cache.unbind(0) for each in layer.unbind(0)]
            raises = config.kv_canary == "raise"
            self._canary = CanaryPlanner(manager), KVCanary(caches, logger, raises=raises)
        # The canary looks at what all earlier work has left, which takes one stream.
        if self._device.type == "cuda" and self._canary is None:
            self.side = SideStream(self._device)
            # The memory of a pass in flight must not be freed: other streams may get it.
            weakref.finalize(self, self.side.release).atexit = False
        # Of captured passes: the engine's own is in use beside them.
        self._pass_workspace = Workspace()
        self._max_num_batched_tokens = config.token_budget

    @torch.inference_mode()
    def warm_up_draws(self) -> None:
        """Draw and report in each way that a step can, for a request slot without a completion, where kernels are
        compiled."""
        slots = np.zeros(1, np.int32)
        params = self._sampling_tensors(slots)
        hidden = self._kv_cache.new_zeros((1, self._model.config.hidden_size))
        logits = self._model.compute_logits(hidden)
        self._sample_tokens(logits, params)
        self._extras.draw(logits, params, slots)
        one_row = np.zeros(1, np.int64)
        report_prompts(self._model, hidden, ReportedRows([], one_row, one_row, np.ones(1, np.int32)))

    def capture_prompts(self) -> None:
        """Capture forward passes over prompts in CUDA graphs."""
        if self._writes_apart:
            return
        self.prompts = PromptGraphs(
            self._forward_prompts,
            self._max_num_batched_tokens,
            self._manager.block_table.shape[1],
            self._device,
            takes_adapters=self.decoder.takes_adapters,
        )
        with self._pass_workspace:
            # On their own stream: the scratch memory of cuBLAS belongs to the stream that a graph is captured on.
            self.prompts.capture(None if self.side is None else self.side.stream)
        self.first_draws = self.make_first_draws()
        self.first_draws.capture()

    def make_first_draws(self) -> SizedGraphs:
        """Return what draws first tokens after a captured pass, where no request needs sampling extras."""
        fields: Fields = {
            "indices": (np.int64, ()),
            "seed": (np.int64, ()),
            "position": (np.int64, ()),
            "words": (np.int32, (len(SAMPLING_FIELDS),)),
        }
        sizes = tuple(size for size in _DRAW_SIZES if size <= self.decoder.num_rows)
        return SizedGraphs(self._draw_first, fields, sizes, self._device)

    def follow_tokens(self, tokens_ahead: Callable[[Int32Array], list[list[int]]]) -> None:
        """Say where masks learn what steps in flight draw; see ``SamplingExtras.tokens_ahead``."""
        self._extras.tokens_ahead = tokens_ahead

    def can_overlap(self, num_decodes: int, num_tokens: int, num_prompts: int) -> bool:
        """Return whether a pass over prompts can run beside decode steps: only captured kernels have a priority."""
        return (
            self.side is not None
            and self.prompts is not None
            and num_decodes <= self.decoder.widths[-1]
            and self.prompts.shape_for(num_tokens, num_prompts) is not None
        )

    @torch.inference_mode()
    def forward(self, step: Step) -> Forwarded:
        """Run the step's clones and its forward passes, which write the K/V of every token in it.

        The decode part goes through fixed buffers and draws its tokens itself; all else is one separate pass, after it
        or at the same time as it and later steps (``Step.has_side_pass``).
        """
        plan = step.clone_plan
        self.watch(plan)
        if plan is not None:
            src, dst = upload(self._device, plan.src_block_ids, plan.dst_block_ids)
            block_clone(self._kv_cache, src, dst, block_dim=2)
            self._manager.finish_clone_plan(plan)
        side = self.side if step.has_side_pass else None
        if side is not None:
            side.mark()
        split, decode_step, decode_rows = step.num_decodes, 0, np.empty(0, np.int64)
        if split:
            decode_step, decode_rows = self.decoder.enqueue(step.slots[:split], step.num_drafts)
        chunks, hidden, report = None, None, None
        if split < len(step.slots):
            chunks = self._make_chunks(step.slots[split:], step.num_new_tokens[split:])
            if side is not None:
                side.begin(functools.partial(self._forward_chunks, chunks.inputs))
            elif (reported := self._take_reported_rows(chunks)) is None:
                hidden = self._forward_chunks(chunks.inputs)
            else:
                states = self._launch_chunks(chunks.inputs, last_tokens_only=False)
                report = report_prompts(self._model, states, reported)
                (last_tokens,) = upload(self._device, chunks.inputs.query_start_loc[1:].astype(np.int64) - 1)
                hidden = Hidden(states[last_tokens], False)
        return Forwarded(step.slots[:split], decode_step, decode_rows, chunks, hidden, report)

    def watch(self, clones: ClonePlan | None) -> None:
        """Look for K/V that was written or read against the rules, before a step with these copies; see ``kv_canary``.

        Raises:
            IntegrityError: there is some.
        """
        if self._canary is not None:
            planner, canary = self._canary
            copied = _NO_BLOCKS if clones is None else clones.dst_block_ids
            canary.before_step(*planner.plan(copied))

    @torch.inference_mode()
    def sample(
        self, hidden: Hidden, due: NDArray[np.intp], slots: Int32Array, sources: NDArray[np.intp]
    ) -> Drawn:
        """Draw the next token of ``slots``.

        Args:
            hidden: of a pass that the current stream has run or joined.
            due: ``[D]`` indices in ``hidden`` of slots that have computed all their tokens.
            slots: ``[S]`` slots to draw for; several may share one distribution.
            sources: ``[S]`` for each the index in ``due`` whose distribution it draws from.
        """
        state, first_tokens = self._state, self.decoder.take_first_tokens(slots)
        if self.head_drafts is not None and len(slots) != len(due):
            # The first of them descend from none but themselves.
            of_sources = slots[: len(due)][sources].astype(np.int64)
            self.head_drafts.copy(*upload(self._device, of_sources, slots.astype(np.int64)))
        needs_sampling_extras = bool(np.count_nonzero(state.needs_sampling_extras[slots]))
        has_masks = bool(np.count_nonzero(state.has_grammar[slots]))
        is_plain = not needs_sampling_extras and not has_masks
        draws = self.first_draws if hidden.is_captured and is_plain else None
        if draws is not None and draws.run(indices=due[sources], **self._sampling_inputs(slots)):
            return Drawn(download(first_tokens), None)
        logits = self._model.compute_logits(hidden.states[upload(self._device, due)[0]])
        if len(slots) != len(due):
            logits = logits[upload(self._device, sources)[0]]
        if has_masks:
            self._extras.mask_first(logits, slots)
        params = self._sampling_tensors(slots)
        drawn = (
            self._extras.draw(logits, params, slots)
            if needs_sampling_extras
            else self._sample_tokens(logits, params)
        )
        first_tokens.copy_(drawn.token_ids)
        report = download(pack_logprobs(logits, drawn)) if needs_sampling_extras else None
        return Drawn(download(drawn.token_ids), report)

    def _decode(
        self, buffers: DecodeBuffers, width: int, drafted: DraftedInputs | None, has_adapters: bool
    ) -> Computed:
        input_ids, positions = buffers.input_ids[:width], buffers.positions[:width]
        num_computed, block_table = buffers.num_computed_tokens[:width], buffers.block_table[:width]
        query_len, starts = 1, None
        if drafted is not None:
            input_ids, positions, starts = drafted
            query_len = len(input_ids) // width
        metadata = AttentionMetadata(
            query_start_loc=starts,
            num_computed_tokens=num_computed,
            block_table=block_table,
            slot_mapping=self._slot_mapping(num_computed, block_table, query_len),
            num_decodes=width,
            decode_query_len=query_len,
        )
        lora_slots = buffers.lora_slots(width, query_len) if has_adapters else None
        hidden, features = self._forward_model(input_ids, positions, metadata, lora_slots)
        logits = self._model.compute_logits(hidden)
        params = (
            buffers.sampling(width) if drafted is None else buffers.sampling_after_drafts(width, query_len)
        )
        return Computed(self._sample_tokens(logits, params).token_ids, logits, features)

    def _forward_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        lora_slots: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return final hidden states, and what a head reads of those in between, [T, E]; None if there is none."""
        if self.head_drafts is None:
            # A family that takes no adapters need not know of them.
            of_adapters: dict[str, Any] = {} if lora_slots is None else {"lora_slots": lora_slots}
            return self._model.forward(input_ids, positions, self._kv_cache, metadata, **of_adapters), None
        held: list[torch.Tensor] = []
        hidden = self._model.forward(input_ids, positions, self._kv_cache, metadata, held)
        return hidden, self.head_drafts.head.combine(held)

    def _forward_prompts(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        next_ids: torch.Tensor,
        slots: torch.Tensor,
        lora_slots: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return final hidden states of a pass without decodes; arguments are those of ``HeadDrafts.read_prompts``."""
        hidden, features = self._forward_model(input_ids, positions, metadata, lora_slots)
        if self.head_drafts is not None and features is not None:
            self.head_drafts.read_prompts(input_ids, positions, features, metadata, next_ids, slots)
        return hidden

    def _slot_mapping(
        self, num_computed: torch.Tensor, block_table: torch.Tensor, query_len: int
    ) -> torch.Tensor | None:
        """Return where ``query_len`` tokens of each row are stored; None where attention does that."""
        if not self._writes_apart:
            return None
        return slots_of_rows(num_computed, block_table, query_len, self._block_size)

    def _draw_first(self, inputs: Inputs) -> None:
        assert self.prompts is not None, "prompts are computed without graphs"
        logits = self._model.compute_logits(self.prompts.hidden[inputs["indices"]])
        drawn = self._sample_tokens(logits, _sampling_tensors(inputs))
        self.decoder.buffers.first_tokens[: len(logits)].copy_(drawn.token_ids)

    def _make_chunks(self, slots: Int32Array, counts: Int32Array) -> Chunks:
        """Return what a pass needs to compute ``counts[i]`` tokens of ``slots[i]``: copies, which nobody changes."""
        start = self._manager.num_computed_tokens[slots]
        ends = np.cumsum(counts, dtype=np.int64)
        slot_of_token = np.repeat(slots, counts)
        positions = np.arange(ends[-1]) + np.repeat(start - (ends - counts), counts)
        token_ids = self._state.token_ids[slot_of_token, positions]
        width = -(-int((start + counts).max()) // self._block_size)
        following = start + counts
        is_known = following < self._state.num_tokens[slots]
        next_ids = self._state.token_ids[slots, np.where(is_known, following, 0)]
        inputs = PassInputs(
            token_ids.astype(np.int64),
            positions,
            np.concatenate([[0], ends]).astype(np.int32),
            start,
            self._manager.block_table[slots, :width],
            np.where(is_known, next_ids, 0).astype(np.int64),
            slots.astype(np.int64),
            self._state.lora_slot[slot_of_token] if self._state.have_adapters(slots) else None,
        )
        return Chunks(slots, counts, token_ids, inputs)

    @torch.inference_mode()
    def _forward_chunks(self, inputs: PassInputs) -> Hidden:
        """Compute chunks. Those of one token are chunks, too: captured or not, one kernel."""
        if self.prompts is not None and (hidden := self.prompts.run(inputs)) is not None:
            return Hidden(hidden, True)
        return Hidden(self._launch_chunks(inputs, last_tokens_only=True), False)

    def _launch_chunks(self, inputs: PassInputs, *, last_tokens_only: bool) -> torch.Tensor:
        """Compute chunks without a graph; return hidden states ``[R, E]`` of last tokens only, or ``[T, E]``."""
        positions, counts = inputs.positions, np.diff(inputs.query_start_loc)
        rows = np.repeat(np.arange(len(counts)), counts)
        blocks = inputs.block_table[rows, positions // self._block_size].astype(np.int64)
        slot_mapping = blocks * self._block_size + positions % self._block_size
        lora_slots = () if inputs.lora_slots is None else (inputs.lora_slots,)
        mapping, *of_pass = upload(self._device, slot_mapping, *inputs[:-1], *lora_slots)
        ids, where, query_start_loc, num_computed, block_table, next_ids, slots, *of_adapters = of_pass
        metadata = AttentionMetadata(
            query_start_loc,
            num_computed,
            block_table,
            mapping,
            num_decodes=0,
            last_tokens_only=last_tokens_only,
        )
        adapters = of_adapters[0] if of_adapters else None
        return self._forward_prompts(ids, where, metadata, next_ids, slots, adapters)

    def _take_reported_rows(self, chunks: Chunks) -> ReportedRows | None:
        """Return what a pass over ``chunks`` reports of prompts; None for nothing."""
        return take_rows(self._state, chunks.slots, chunks.inputs.num_computed_tokens, chunks.num_new_tokens)

    def _sampling_tensors(self, slots: Int32Array) -> SamplingTensors:
        inputs = self._sampling_inputs(slots)
        return _sampling_tensors(dict(zip(inputs, upload(self._device, *inputs.values()), strict=True)))

    def _sampling_inputs(self, slots: Int32Array) -> dict[str, NDArray[Any]]:
        state = self._state
        position = state.num_tokens[slots].astype(np.int64)
        return {"seed": state.seed[slots], "position": position, "words": state.sampling_words[slots]}


def _sampling_tensors(inputs: Inputs) -> SamplingTensors:
    """Return the parameters of draws from seed, position and ``SAMPLING_FIELDS`` of each, ``[R, ...]``."""
    return sampling_tensors(inputs["seed"], inputs["position"], sampling_of_rows(inputs["words"]))
