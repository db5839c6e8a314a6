"""Draws of model runner V2 as one CUDA graph per number of rows: parameters, temperature, min-p, filters, the draw.

Launched one by one, these dozen operations take the CPU longer than a small model's whole step takes the device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rose_backend.kernels.sampling.ops import SAMPLER_KERNELS
from rose_backend.vllm_plugin.pending_kernels import wait_for_kernels
from rose_backend.vllm_plugin.sampler.sampler_v1 import draw, is_sampler_chosen, why_vllm_draws

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

MAX_LOGITS_BYTES = 64 << 20
"""Of float32 logits that graphs read: 333 rows of 50,257 tokens, 110 of 151,936. With more the device is the limit."""

PARAMETERS = ("temperature", "min_p", "top_k", "top_p", "seeds")
"""Of vLLM's ``SamplingStates``, all that a draw takes."""


def captures_draws(vllm_config: VllmConfig) -> bool:
    """Whether this engine's steps are replayed from CUDA graphs, and graphs may be captured while it loads."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    from rose_backend.vllm_plugin.options import rose_options

    model_config = vllm_config.model_config
    return (
        current_platform.is_cuda()
        and model_config is not None
        and not model_config.enforce_eager
        # What is allocated while a model loads is thrown away when it sleeps.
        and not model_config.enable_sleep_mode
        and rose_options(vllm_config).cuda_graph
        and vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
    )


def draw_graph_sizes(max_num_reqs: int, vocab_size: int) -> tuple[int, ...]:
    """Return the numbers of rows that graphs are captured for, rising; none if even one row has too many logits."""
    limit = min(max_num_reqs, MAX_LOGITS_BYTES // (4 * vocab_size))
    if limit == 0:
        return ()
    sizes = [1, 2, 4, 8, 16, 32, 48, 64, *range(96, limit, 32)]
    return (*(size for size in sizes if size < limit), limit)


class DrawGraphs:
    """One token per row, drawn as ``Sampler.sample`` of model runner V2 and ``draw`` would, by one graph.

    Only for rows whose logits are changed by temperature and min-p alone. Padding rows are greedy.

    Args:
        states: vLLM's ``SamplingStates``.
    """

    def __init__(self, states: Any) -> None:
        import torch

        from rose_backend.kernels.captured_graphs import CapturedGraphs

        device = states.temperature.gpu.device
        self.sizes = draw_graph_sizes(states.max_num_reqs, states.vocab_size)
        num_rows, self._num_slots = max(self.sizes, default=0), states.max_num_reqs
        self._states = states
        self._vocab_size = states.vocab_size
        # The last slot belongs to no request: padding rows use it, and its temperature stays 0.
        self._parameters = {
            name: torch.zeros(self._num_slots + 1, dtype=getattr(states, name).gpu.dtype, device=device)
            for name in PARAMETERS
        }
        self._logits = torch.zeros(num_rows, states.vocab_size, device=device)
        self._slots = torch.full((num_rows,), self._num_slots, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._num_rows = 0
        # Threads of other parts of vLLM may wait for the device during a capture.
        self._graphs = CapturedGraphs[int](self._compute, capture_error_mode="thread_local")

    def capture(self) -> None:
        """Capture a graph of each size."""
        from rose_backend.kernels.gpu_properties import is_recording

        if not is_recording():
            wait_for_kernels(*SAMPLER_KERNELS)
        self._graphs.capture(reversed(self.sizes))

    def take_parameters(self) -> None:
        """Copy what vLLM has of its requests on the device. To be called in every step in which that has changed."""
        for name, copy in self._parameters.items():
            copy[: self._num_slots].copy_(getattr(self._states, name).gpu)

    def serves(self, logits: torch.Tensor) -> bool:
        """Whether there is a graph for this number of rows."""
        num_rows, vocab_size = logits.shape
        return vocab_size == self._vocab_size and 0 < num_rows <= len(self._logits)

    def draw(
        self,
        logits: torch.Tensor,  # [R, V], stay as they are
        slots: torch.Tensor,  # [R] int32, row -> request slot
        positions: torch.Tensor,  # [R] int64
    ) -> torch.Tensor:
        """Return one token per row, int64 [R], for logits that ``serves`` is true of."""
        num_rows = len(logits)
        self._logits[:num_rows].copy_(logits)
        self._slots[:num_rows].copy_(slots)
        self._positions[:num_rows].copy_(positions)
        if num_rows < self._num_rows:
            self._slots[num_rows : self._num_rows].fill_(self._num_slots)
        self._num_rows = num_rows
        self._graphs.run(next(size for size in self.sizes if size >= num_rows))
        # The next step draws into the same memory, while the CPU may still be reading this one's.
        return self._token_ids[:num_rows].clone()

    def compute(
        self,
        logits: torch.Tensor,  # [R, V], R at most the largest of ``sizes``; stay as they are
        slots: torch.Tensor,  # [R] int32, row -> request slot; ``padding_slot`` without a request
        positions: torch.Tensor,  # [R] int64
    ) -> torch.Tensor:
        """Return one token per row, int64 [R]. For steps that are captured as a whole."""
        own_logits = self._logits[: len(logits)].copy_(logits)
        return self._drawn(own_logits, slots, positions)

    def _drawn(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
        from vllm.v1.worker.gpu.sample.min_p import apply_min_p

        apply_temperature(logits, slots, self._parameters["temperature"])
        apply_min_p(logits, slots, self._parameters["min_p"])
        of_row = {name: values.index_select(0, slots) for name, values in self._parameters.items()}
        return draw(
            logits,
            # Already applied; only its sign is needed, for greedy rows.
            of_row["temperature"].sign(),
            of_row["top_k"],
            of_row["top_p"],
            of_row["seeds"],
            positions,
        )

    @property
    def padding_slot(self) -> int:
        """The slot of rows without a request."""
        return self._num_slots

    def _compute(self, size: int, _: None = None) -> None:
        self._token_ids[:size] = self._drawn(self._logits[:size], self._slots[:size], self._positions[:size])


def launch_draws(vllm_config: VllmConfig, layer: Any) -> None:
    """Launch what an engine's draws launch, if Rose draws, on tensors without memory."""
    import torch

    if not is_sampler_chosen(vllm_config) or why_vllm_draws(vllm_config) is not None:
        return
    num_slots, vocab_size = (
        vllm_config.scheduler_config.max_num_seqs,
        vllm_config.model_config.get_vocab_size(),
    )
    integers = {"top_k": torch.int32, "seeds": torch.int64}
    of_slot = {
        name: torch.empty(num_slots, dtype=integers.get(name, torch.float32), device="meta")
        for name in PARAMETERS
    }
    temperature, _, top_k, top_p, seeds = of_slot.values()
    # Launched, rows of logits are those of a tensor, or of a product with a head that ends with rows of padding.
    for width in (vocab_size, -(-vocab_size // 16) * 16):
        logits = torch.empty((num_slots, width), device="meta")[:, :vocab_size]
        draw(logits, temperature, top_k, top_p, seeds, torch.empty_like(seeds))
    if vllm_config.speculative_config is None and captures_draws(vllm_config):
        states = {name: SimpleNamespace(gpu=values) for name, values in of_slot.items()}
        DrawGraphs(SimpleNamespace(**states, max_num_reqs=num_slots, vocab_size=vocab_size)).capture()
