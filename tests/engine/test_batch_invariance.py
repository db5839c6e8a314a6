"""With ``batch_invariant`` log-probabilities and draws of a request are the same bits, whatever is computed with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose_backend import LLM, SamplingParams, kernels
from rose_backend.config import EngineConfig
from rose_backend.engine.decode_runner import SamplingExtras
from rose_backend.engine.outputs import RequestOutput
from rose_backend.engine.sequence_state import SequenceState
from rose_backend.errors import ConfigError
from rose_backend.kernels import SampleOutput, SamplingTensors
from tests.support.llama_checkpoints import write_checkpoint
from tests.support.sampling_cases import make_params
from tests.support.tiny_checkpoint import write_random_gpt2

MODELS = Path(__file__).resolve().parents[2] / "models"
EMBEDDED = ["tiny-gpt2", "tiny-qwen3-chat"]
FAMILIES = ["llama", "mistral", "qwen2"]


@pytest.fixture(params=[*EMBEDDED, *FAMILIES])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in EMBEDDED:
        return str(MODELS / request.param)
    write_checkpoint(tmp_path, request.param)
    return str(tmp_path)


def engine(model: str, **options: Any) -> LLM:
    return LLM(model, **{"dtype": "float32", "device": "cpu", "batch_invariant": True, **options})


def bits(output: RequestOutput) -> list[Any]:
    """Return everything of an answer that may not change."""
    reports = [each.logprobs for each in output.outputs]
    found: list[Any] = [each.token_ids for each in output.outputs]
    found += [[{i: each.logprob.hex() for i, each in place.items()} for place in of] for of in reports if of]
    if output.prompt_logprobs is not None:
        found.append(
            [place and {i: e.logprob.hex() for i, e in place.items()} for place in output.prompt_logprobs]
        )
    return found


def random_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts, some of which begin alike, and parameters of all kinds."""
    draw = np.random.default_rng(seed)
    shared = draw.integers(1, 400, 80).tolist()
    requests = []
    for index in range(count):
        own = draw.integers(1, 400, int(draw.integers(1, 40))).tolist()
        prompt = shared[: int(draw.integers(0, 80))] + own
        params = SamplingParams(
            n=int(draw.integers(1, 4)),
            temperature=float(draw.choice([0.0, 0.7, 1.3])),
            top_p=float(draw.choice([0.9, 1.0])),
            top_k=int(draw.choice([0, 20])),
            presence_penalty=float(draw.choice([0.0, 0.5])),
            seed=index,
            max_tokens=int(draw.integers(1, 12)),
            ignore_eos=True,
            logprobs=int(draw.integers(0, 5)),
            prompt_logprobs=2 if index % 5 == 0 else None,
        )
        requests.append((prompt, params))
    return requests


# Cut small; in a pool that preempts; whole prompts at once, and steps in which nothing is fused.
WAYS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 13, "max_num_seqs": 9},
    {"num_blocks": 18, "max_model_len": 160, "max_num_batched_tokens": 64},
    {"chunked_prefill": False, "fused_sampler": False, "run_ahead": 2},
]


def check_same(found: list[list[Any]], expected: list[list[Any]], options: dict[str, Any]) -> None:
    """Compare answers, and name of each that differs the first place and what was drawn and reported there."""
    differing = {
        index: next((kind, place, *pair) for kind, place, *pair in _places(one, other) if pair[0] != pair[1])
        for index, (one, other) in enumerate(zip(found, expected, strict=True))
        if one != other
    }
    assert differing == {}, options


def _places(one: list[Any], other: list[Any]) -> Iterator[tuple[int, int, Any, Any]]:
    """Yield of two answers the number of a list, a place in it, and what both have there."""
    for kind, lists in enumerate(zip_longest(one, other)):
        for place, pair in enumerate(zip_longest(*(each or [] for each in lists))):
            yield kind, place, *pair


def check_any_batch(model: str, count: int, **given: Any) -> None:
    """Compare requests alone, from an empty cache, with the same together, twice in each of ``WAYS``."""
    requests = random_requests(count, seed=3)
    prompts, params = [list(each) for each in zip(*requests, strict=True)]
    alone = {}
    # Two samplers agree within rounding.
    for fused in (True, False):
        with engine(model, prefix_cache=False, fused_sampler=fused, **given) as llm:
            alone[fused] = [bits(llm.generate([prompt], one)[0]) for prompt, one in requests]
    for options in WAYS:
        with engine(model, **given, **options) as llm:
            for _ in range(2):
                together = [bits(each) for each in llm.generate(prompts, params)]
                check_same(together, alone[options.get("fused_sampler", True)], options)
            if "num_blocks" in options:
                assert llm.stats.preemptions > 0
            assert llm.stats.cached_tokens > 0


def test_any_batch_and_any_cut_gives_the_same_bits(model: str) -> None:
    check_any_batch(model, 12)


def test_threads_that_share_a_row_change_nothing(tmp_path: Path) -> None:
    """Torch splits numbers, not rows: one thread's last ones, which vectors do not hold, may be in any row."""
    # 12 x 86 numbers of GELU in each row, of which a vector of 16 leaves 8.
    write_random_gpt2(tmp_path, n_embd=258, n_head=6)
    prompt = np.random.default_rng(7).integers(1, 400, 67).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    found = []
    for budget in (5, 512):
        with engine(str(tmp_path), num_threads=2, max_num_batched_tokens=budget) as llm:
            found.append(bits(llm.generate([prompt], params)[0]))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "tiny-gpt2"])
def test_any_batch_and_any_cut_gives_the_same_bits_on_a_gpu(
    family: str, cuda_graph: bool, tmp_path: Path
) -> None:
    path = MODELS / family
    if family not in EMBEDDED:
        path, sizes = tmp_path, {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
        write_checkpoint(path, family, **sizes, num_attention_heads=8, initializer_range=0.05)
    check_any_batch(str(path), 64, device="cuda", dtype="bfloat16", cuda_graph=cuda_graph)


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_hit_may_end_at_any_token(name: str) -> None:
    prompt = np.random.default_rng(5).integers(1, 400, 53).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=4)
    with engine(str(MODELS / name), block_size=16) as llm:
        cold = bits(llm.generate([prompt], params)[0])
        for cut in range(1, len(prompt)):
            assert llm.core.manager.reset_prefix_cache()
            llm.generate([[*prompt[:cut], prompt[cut] % 400 + 1]], replace(params, max_tokens=1))
            warm = llm.generate([prompt], params)[0]
            assert warm.num_cached_tokens == cut
            assert bits(warm) == cold, cut


def test_without_it_the_numbers_differ() -> None:
    """The tests above would find a difference."""
    requests = random_requests(12, seed=3)
    prompts, params = [list(each) for each in zip(*requests, strict=True)]
    with engine(str(MODELS / "tiny-qwen3-chat"), batch_invariant=False, max_num_batched_tokens=13) as llm:
        together = [bits(each) for each in llm.generate(prompts, params)]
    with engine(str(MODELS / "tiny-qwen3-chat"), batch_invariant=False, prefix_cache=False) as llm:
        assert together != [bits(llm.generate([prompt], one)[0]) for prompt, one in requests]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tiny-qwen3-chat-fp8", "quantized weights"),
        ("tiny-qwen3-chat-w4a16", "quantized weights"),
        (None, "experts"),
    ],
)
def test_other_models_are_refused_before_weights_are_read(
    name: str | None, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path if name is None else MODELS / name
    if name is None:
        write_checkpoint(tmp_path, "qwen3-moe")

    def read(*args: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("rose_backend.models.llama.load_weights", read)
    with pytest.raises(
        ConfigError, match=f"batch_invariant: got true with a model that has {kind}; allowed are"
    ):
        engine(str(path), dtype="auto")


def test_all_draws_are_compiled_alike() -> None:
    """Whether a row's own draw has penalties and reports must not follow from the rows beside it."""
    calls: list[tuple[Any, ...]] = []

    def choose(logits: torch.Tensor, params: SamplingTensors) -> SampleOutput:
        optional = params.prompt_mask, params.output_counts, params.processors
        calls.append((*(each is None for each in optional), params.num_logprobs >= 0))
        return kernels.sample(logits, params)

    extras = SamplingExtras(SequenceState(4, 64), choose, 50, torch.device("cpu"), draws_alike=True)
    logits, params = torch.randn(2, 50), make_params(2, temperature=[0.0, 1.0])
    plain = extras.sample_plain(logits, params)
    drawn = extras.draw(logits, params, np.arange(2, dtype=np.int32))
    assert calls == [(False, False, False, True)] * 2
    assert (
        plain.token_ids.tolist()
        == drawn.token_ids.tolist()
        == kernels.sample(logits, params).token_ids.tolist()
    )


def test_drafts_are_refused() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(
        ConfigError, match="speculative_config: got drafts, allowed are none with batch_invariant"
    ):
        EngineConfig(model="any", batch_invariant=True, speculative_config=drafts)


def test_adapters_are_refused() -> None:
    """How their products are added up depends on the rows that share one."""
    with pytest.raises(ConfigError, match="enable_lora: got True, allowed is False with batch_invariant"):
        EngineConfig(model="any", batch_invariant=True, enable_lora=True)
