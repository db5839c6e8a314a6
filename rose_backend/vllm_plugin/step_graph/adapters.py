"""LoRA adapters of replayed steps: which a step needs, and which each row has."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput


class StepAdapters:
    """The adapters of one model runner's steps; without LoRA, none.

    Args:
        runner: vLLM's ``GPUModelRunner`` (V2).
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.is_on = runner.lora_config is not None
        # The adapter in each LoRA slot when kernels were last told those of the rows.
        self._lora_slots: list[int | None] | None = None

    def of_step(self, output: SchedulerOutput) -> set[LoRARequest]:
        """Return the LoRA adapters of a step's requests, of those that it adds, too."""
        if not self.is_on:
            return set()
        added = {new.lora_request for new in output.scheduled_new_reqs if new.lora_request is not None}
        active: set[LoRARequest] = self._runner.lora_state.get_activate_loras(
            output.scheduled_cached_reqs.req_ids
        )
        return active | added

    def why_vllm_loads(self, adapters: set[LoRARequest]) -> str | None:
        """Return why a step's adapters are vLLM's to load; None if it has all in memory, or the step has none."""
        if not adapters:
            return None
        loaded = self._runner.lora_manager.list_adapters()
        is_missing = any(each.load_inplace or each.lora_int_id not in loaded for each in adapters)
        return "an adapter to load" if is_missing else None

    @torch.inference_mode()
    def tell_rows(self, slots: dict[str, int], counts: Sequence[int]) -> None:
        """Tell vLLM's kernels the adapter of each row, and of each token; activate adapters that have been evicted.

        vLLM does this in every step. It waits for the device, so here it is done when the batch or a LoRA slot changes.

        Args:
            slots: of the requests, in the order of rows.
            counts: tokens of each row.
        """
        if not self.is_on:
            return
        runner = self._runner
        inputs = runner.lora_state.make_lora_inputs(
            list(slots), np.fromiter(slots.values(), np.int64, len(slots)), np.asarray(counts, np.int32)
        )
        runner._set_active_loras(*inputs)
        self._lora_slots = list(runner.model.lora_manager.lora_index_to_id)

    def have_moved(self) -> bool:
        """Whether an adapter has entered or left a LoRA slot since kernels were last told those of the rows."""
        return self.is_on and self._runner.model.lora_manager.lora_index_to_id != self._lora_slots

    def in_one_row(self) -> AbstractContextManager[None]:
        """Return a context in which ends are captured: with LoRA, the first row has an adapter.

        Captured kernels skip rows without one. vLLM's write all rows that they are told of, though a smaller batch has
        fewer: so no more than the smallest end has.
        """
        counts = np.ones(1, np.int32)
        context: AbstractContextManager[None] = self._runner.maybe_dummy_run_with_lora(
            self._runner.lora_config, counts, None, num_active_loras=1
        )
        return context
