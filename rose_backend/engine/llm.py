"""LLM: generate text from Python, in the caller's own thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import fields
from typing import Any, TypeAlias

from rose_backend.config import EngineConfig
from rose_backend.engine.core import EngineCore, EngineStats
from rose_backend.engine.outputs import GrowingCompletions, RequestOutput
from rose_backend.engine.process_settings import short_switch_interval
from rose_backend.engine.progress import GenerationProgress
from rose_backend.engine.request import LoRARequest, ProcessedInput, Prompt, sampling_defaults
from rose_backend.engine.sampling_params import SamplingParams
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import EngineDeadError, RequestError

LoRARequests: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one or None for each; None: no prompt has one."""


class LLM(AbstractContextManager["LLM"]):
    """A model with its KV pool, ready to generate::

        with LLM("models/tiny-gpt2") as llm:
            for output in llm.generate(["The rose", "Once upon a time"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    Args:
        model: local directory or Hugging Face id.
        **options: fields of ``EngineConfig``.

    Raises:
        ConfigError: unknown option (the nearest valid one is named) or bad value.
        ModelError: the model cannot be loaded.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.config = EngineConfig.from_mapping({"model": model, **options}, source="LLM")
        self._defaults = sampling_defaults(self.config)
        self._core: EngineCore | None = EngineCore(self.config)
        self._unclaimed: list[RequestOutput] = []

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Build from checked options; errors are those of the constructor."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(config)})

    @property
    def core(self) -> EngineCore:
        """The engine inside.

        Raises:
            EngineDeadError: ``close`` was called.
        """
        if self._core is None:
            raise EngineDeadError("this LLM was closed")
        return self._core

    @property
    def stats(self) -> EngineStats:
        """Counters since the start: steps, computed and cached tokens, preemptions, clones."""
        return self.core.stats

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.core.input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what ``generate`` takes for None: the parameters of the model's generation_config.json, if any."""
        return self._defaults.sampling_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts at once.

        Args:
            prompts: one prompt or many, each a string, a list of token ids, or as in vLLM a dictionary with either as
                ``prompt`` or ``prompt_token_ids`` and, for a separate prefix cache, a ``cache_salt``.
            sampling_params: one for all, or one for each prompt; None takes those of ``get_default_sampling_params``,
                with fewer ``max_tokens`` where the window ends before.
            lora_request: an adapter for all prompts, or for each an adapter or None; with ``enable_lora``. What is not
                loaded is loaded before; if all slots are taken, into that of the one that was loaded first and is not
                in use.
            progress: show on stderr how many prompts and tokens are done: a bar at a terminal, else lines.

        Returns:
            One finished output per prompt, in order.

        Raises:
            RequestError: a prompt, its parameters or its adapter are not allowed; nothing has been computed then.
            EngineDeadError: the engine failed.
        """
        prompt_list = _as_prompt_list(prompts)
        outputs: list[RequestOutput | None] = [None] * len(prompt_list)
        finished = self.generate_unordered(
            prompt_list, sampling_params, lora_request=lora_request, progress=progress
        )
        for index, output in finished:
            outputs[index] = output
        return [output for output in outputs if output is not None]

    def generate_unordered(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequests = None,
        progress: bool = False,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Generate for all prompts at once and yield each as soon as it has finished, with its index.

        Closing the iterator aborts what is left. Arguments and errors are those of ``generate``; what its caller does
        with an output comes before progress counts it. An iterator that has not started holds no slot of an adapter: it
        loads again what other calls have taken the place of, or is refused then.
        """
        checked, adapters = self._with_adapters(self._check(prompts, sampling_params), lora_request)
        steps = self._run(checked, adapters, is_streaming=False)
        return self._with_progress(steps, len(prompts)) if progress else _each(steps)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield its output after every token.

        ``outputs[i].delta_text`` is the text that is new. Closing the iterator aborts the request.

        Raises:
            RequestError: the prompt, the parameters or the adapter are not allowed.
            EngineDeadError: the engine failed.
        """
        checked, adapters = self._with_adapters(self._check([prompt], sampling_params), lora_request)
        return _accumulated(_each(self._run(checked, adapters, is_streaming=True)))

    def close(self) -> None:
        """Release the model and the KV pool. May be repeated."""
        if self._core is not None:
            self._core.close()
        self._core = None

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[ProcessedInput]:
        if sampling_params is None:
            return self._defaults.process_all(self.core.input_processor, prompts)
        if isinstance(sampling_params, SamplingParams):
            params_list: Sequence[SamplingParams] = [sampling_params] * len(prompts)
        else:
            params_list = sampling_params
        if len(params_list) != len(prompts):
            raise RequestError(
                f"sampling_params: got {len(params_list)} for {len(prompts)} prompts, allowed are one, or one for each",
                parameter="sampling_params",
            )
        checked = self.core.input_processor.process_all(prompts, params_list)
        for params in {id(each.params): each.params for each in checked}.values():
            if params.structured_outputs is not None:
                self.core.grammars.compile(params)
        return checked

    def _with_adapters(
        self, checked: list[ProcessedInput], lora_request: LoRARequests
    ) -> tuple[list[ProcessedInput], list[LoRARequest]]:
        """Return prompts with the ids of their adapters, and these, which are loaded."""
        if lora_request is None:
            return checked, []
        requests: Sequence[LoRARequest | None]
        requests = lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(checked)
        wrong = [each for each in requests if each is not None and not isinstance(each, LoRARequest)]
        if wrong or len(requests) != len(checked):
            got = type(wrong[0]).__name__ if wrong else f"{len(requests)} for {len(checked)} prompts"
            raise RequestError(
                f"lora_request: got {got}, allowed are a LoRARequest, or one or None for each prompt",
                parameter="lora_request",
            )
        adapters = list(dict.fromkeys(each for each in requests if each is not None))
        self._hold(adapters).close()
        ids = [0 if each is None else each.lora_int_id for each in requests]
        adapted = [prompt._replace(lora_id=lora_id) for prompt, lora_id in zip(checked, ids, strict=True)]
        return adapted, adapters

    def _hold(self, adapters: list[LoRARequest]) -> ExitStack:
        """Load adapters that are not loaded; all keep their slots until the answer is closed."""
        kept = [each.lora_int_id for each in adapters]
        with ExitStack() as held:
            for lora in adapters:
                held.enter_context(self.core.adapter_table().held(lora, kept))
            return held.pop_all()

    def _run(
        self, checked: list[ProcessedInput], adapters: list[LoRARequest], *, is_streaming: bool
    ) -> Iterator[list[tuple[int, RequestOutput]]]:
        """Yield after each step what it gave, with the indexes of the prompts."""
        core = self.core
        # Until each prompt has been added: from then on, requests hold their adapters.
        held = self._hold(adapters)
        queue = deque(enumerate(checked))
        unfinished: dict[str, int] = {}
        # The first step starts as soon as it is full; the other requests are built while it runs.
        tokens_to_feed: float = core.token_budget
        try:
            while queue or unfinished:
                # A long list does not count against the queue's limit: it is fed in as the queue drains.
                while queue and tokens_to_feed > 0 and core.num_waiting < core.config.max_queue_size:
                    index, prompt = queue.popleft()
                    request = core.input_processor.build(prompt, is_streaming=is_streaming)
                    core.add(request)
                    unfinished[request.request_id] = index
                    tokens_to_feed -= len(prompt.token_ids)
                if not queue:
                    held.close()
                tokens_to_feed = math.inf
                outputs = self._outputs_of(core, unfinished)
                indexed = [(unfinished[output.request_id], output) for output in outputs]
                for output in outputs:
                    if output.finished:
                        del unfinished[output.request_id]
                yield indexed
        finally:
            held.close()
            if core.is_alive:
                self._unclaimed = [each for each in self._unclaimed if each.request_id not in unfinished]
                for request_id in unfinished:
                    core.abort(request_id)

    def _with_progress(
        self, steps: Iterable[list[tuple[int, RequestOutput]]], num_prompts: int
    ) -> Iterator[tuple[int, RequestOutput]]:
        core = self.core
        with GenerationProgress(num_prompts, lambda: core.stats.generated_tokens) as progress:
            for outputs in steps:
                yield from outputs
                progress.update(len(outputs))

    def _outputs_of(self, core: EngineCore, requests: Container[str]) -> list[RequestOutput]:
        """Return the next outputs of ``requests`` after at most one step; those of other iterators are kept."""
        if not any(output.request_id in requests for output in self._unclaimed):
            # Only during the step: between steps, the caller keeps its own switch interval.
            with short_switch_interval():
                self._unclaimed += core.step()
        outputs = self._unclaimed
        self._unclaimed = [output for output in outputs if output.request_id not in requests]
        return [output for output in outputs if output.request_id in requests] if self._unclaimed else outputs


def _each(steps: Iterable[list[tuple[int, RequestOutput]]]) -> Iterator[tuple[int, RequestOutput]]:
    for outputs in steps:
        yield from outputs


def _accumulated(outputs: Iterator[tuple[int, RequestOutput]]) -> Iterator[RequestOutput]:
    """Yield the outputs of one request, each with all that came before."""
    completions = GrowingCompletions()
    for _, output in outputs:
        completions.add(output.outputs)
        output.outputs = completions.snapshot()
        yield output


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts: got {type(prompts).__name__}, allowed are a prompt and a list of prompts",
            parameter="prompts",
        )
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items
