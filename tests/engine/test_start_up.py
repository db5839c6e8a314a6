"""What an engine chooses, tells and shows before its first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from triton import next_power_of_2

from rose_backend import LLM
from rose_backend.config import EngineConfig
from rose_backend.engine import progress
from rose_backend.engine import startup as start_up_report
from rose_backend.engine.gpu_startup import decode_kinds, padding_passes, token_counts
from rose_backend.engine.process_settings import note_imports, process_age_s
from rose_backend.engine.startup import StartUpReport, show_start_up, storage_bytes
from rose_backend.engine.tokenizer import Tokenizer
from rose_backend.errors import ConfigError
from rose_backend.kernels.gpu_properties import GpuProperties, meta_stands_for
from rose_backend.kernels.tuning.choices import (
    TUNED_QUERY_LENS,
    choose_expert_config,
    choose_int4_config,
    decode_tuning,
    prefill_tuning,
    rows_tile,
)
from rose_backend.layers.linear import Linear, adds_halves
from rose_backend.models.config import ModelConfig
from rose_backend.scheduling import default_token_budget
from tests.support.quantized_checkpoints import describe

GIB = 1 << 30
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3}
ON_GPU = StartUpReport(
    config=EngineConfig(model="m", max_num_batched_tokens=16_384),
    memory={
        "weights": GIB,
        "packed copies of weights": GIB // 2,
        "KV pool": 4 * GIB,
        "captured": 0,
        "free": 0,
    },
    total_memory=5 * GIB + GIB // 2,
    num_blocks=4097,
    max_model_len=1000,
    seconds={"weights": 1.25, "kernels": 2.0},
    num_kernels=40,
    kernel_seconds=1.5,
)


def test_report_of_an_engine_on_a_cpu(tiny_model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), LLM(str(tiny_model_path), device="cpu", max_num_seqs=3) as llm:
        report, core = llm.core.start_up, llm.core
        model = core._runner._model
    assert report.memory["KV pool"] == core._runner._kv_cache.nbytes
    stored = load_file(tiny_model_path / "model.safetensors")
    # The embedding has rows of padding behind it, and is the head.
    padding = (model.weights.padded_lm_head.shape[0] - model.config.vocab_size) * model.config.hidden_size
    assert report.memory["weights"] == 4 * (sum(tensor.numel() for tensor in stored.values()) + padding)
    assert (report.memory["packed copies of weights"], report.total_memory, report.num_kernels) == (
        0,
        None,
        0,
    )
    assert (report.num_blocks, report.max_concurrency, report.num_kv_tokens) == (3 * 64 + 1, 3.0, 3 * 1024)
    assert report.config.max_num_batched_tokens == core.config.max_num_batched_tokens == 2048
    assert llm.config.max_num_batched_tokens is None
    for name, value in report.lines():
        assert f"{name}: {value}" in caplog.text


def test_lines_say_where_memory_and_time_went() -> None:
    lines = dict(ON_GPU.lines())
    assert lines["weights"] == "1,024 MiB"
    assert lines["packed copies of weights"] == "512 MiB"
    assert lines["free"] == "0 MiB" and lines["total"] == "5,632 MiB"
    assert lines["KV blocks"] == "4,097 of 16 tokens: 65,536 tokens"
    assert lines["at full length"] == "65.0 sequences of 1,000; more wait for blocks"
    all_fit = dict(replace(ON_GPU, config=replace(ON_GPU.config, max_num_seqs=65)).lines())
    assert all_fit["at full length"] == "65.0 sequences of 1,000; all that may run"
    assert lines["a step at most"] == "256 sequences, 16,384 tokens"
    assert lines["start-up"] == "3.2 s: weights 1.2, kernels 2.0"
    assert lines["kernels"] == "40 compiled or loaded in 1.5 s of that"
    assert "captured" not in lines


@pytest.mark.parametrize("is_terminal", [True, False])
def test_table_is_for_terminals(is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(
        start_up_report,
        "Console",
        lambda stderr: Console(stderr=stderr, force_terminal=is_terminal, width=100),
    )
    show_start_up(ON_GPU)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert ("4,097 of 16 tokens" in captured.err) == is_terminal


def test_a_commands_start_up_begins_with_its_process(make_llm: Callable[..., LLM]) -> None:
    before = time.perf_counter()
    seconds = make_llm().core.start_up.seconds
    assert "imports" not in seconds, "a program may have run for hours before"
    note_imports()
    at_least = time.perf_counter() - before
    seconds = make_llm().core.start_up.seconds
    assert next(iter(seconds)) == "imports"
    # The clock that says when a process has begun has steps of 10 ms.
    assert at_least <= seconds["imports"] + 0.01 <= process_age_s() + 0.02
    assert "imports" not in make_llm().core.start_up.seconds, "imports were waited for once"


def test_an_allocation_that_two_tensors_share_counts_once() -> None:
    table = torch.zeros(10, 4)
    holder = {"a": [table[:3], (table, torch.zeros(2))], "b": "text", "c": ON_GPU}
    assert storage_bytes(holder) == 40 * 4 + 8


@pytest.mark.parametrize(
    ("gib", "is_online", "expected"),
    [(140, False, 16_384), (140, True, 8192), (24, False, 8192), (24, True, 2048)],
)
def test_tokens_of_a_step_by_device(
    gib: int, is_online: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gib * GIB)
    )
    assert default_token_budget(torch.device("cuda"), is_online=is_online) == expected
    assert default_token_budget(torch.device("cpu"), is_online=is_online) == 2048


@pytest.mark.parametrize(
    ("max_num_seqs", "token_budget"), [(1, 1), (13, 61), (48, 8192), (256, 1000), (256, 16_384)]
)
@pytest.mark.parametrize("head_size", [64, 128])
def test_padding_passes_reach_every_kernel_of_attention(
    head_size: int, max_num_seqs: int, token_budget: int
) -> None:
    config = EngineConfig(model="m", max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget)
    passes = padding_passes(config)

    def kernel(num_rows: int, mean: float) -> Any:
        options = (head_size, torch.float16, (9, 0))
        return rows_tile(num_rows), prefill_tuning(mean, *options, is_describable=True)

    reached = {kernel(each.num_prefills, each.tokens_per_prefill) for each in passes if each.num_prefills}
    for num_rows in range(1, max_num_seqs + 1):
        for num_tokens in {num_rows, *range(num_rows, token_budget + 1, 37)} & set(range(token_budget + 1)):
            assert kernel(num_rows, num_tokens / num_rows) in reached


@pytest.mark.parametrize("max_num_seqs", [1, 13, 48, 256, 300])
def test_padding_passes_reach_every_kernel_of_decode_steps(max_num_seqs: int) -> None:
    def kind(num_rows: int) -> Any:
        return decode_tuning(64, torch.float16, 132, num_rows=num_rows, num_kv_heads=12)

    config = EngineConfig(model="m", max_num_seqs=max_num_seqs, max_num_batched_tokens=2048)
    passes = padding_passes(config, kind)
    assert all(each.num_tokens <= 2048 for each in passes)

    def kernel(num_rows: int) -> Any:
        return next_power_of_2(num_rows), kind(num_rows)

    decodes = [each.num_decodes for each in passes if not each.num_prefills]
    assert {kernel(count) for count in decodes} == {kernel(count) for count in range(1, max_num_seqs + 1)}
    assert max(decodes) <= max_num_seqs and len(decodes) < 30


def test_kernels_are_prepared_for_grouped_heads() -> None:
    fields = {
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }
    model = ModelConfig.from_hf(fields, names={"norm_eps": "rms_norm_eps"}, dtype=torch.float16, device="cpu")
    kind = decode_kinds(model, 132)
    kinds = [kind(num_rows) for num_rows in range(1, 257)]

    def tunings(*, norms_heads: bool) -> list[Any]:
        # One program attends the four query heads that share a K/V head.
        options = {"num_queries": 4, "num_kv_heads": 8, "norms_heads": norms_heads}
        return [
            decode_tuning(128, torch.float16, 132, num_rows=num_rows, **options) for num_rows in range(1, 257)
        ]

    def changes(kinds: list[Any]) -> set[int]:
        return {row for row in range(2, 257) if kinds[row - 1] != kinds[row - 2]}

    # More than 132 rows begin in turns.
    with_norms = tunings(norms_heads=True)
    without = tunings(norms_heads=False)
    assert [kind[:3] for kind in kinds] == [
        (*both, row > 132) for row, both in enumerate(zip(without, with_norms, strict=True), 1)
    ]
    assert changes(kinds) == changes(without) | changes(with_norms) | {2, 33}


@pytest.mark.parametrize(("max_num_seqs", "token_budget"), [(1, 600), (13, 1000), (256, 300), (48, 4096)])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 4), (16, 2), (256, 8)])
def test_padding_passes_reach_every_cut_of_experts(
    num_experts: int, top_k: int, max_num_seqs: int, token_budget: int
) -> None:
    model: Any = SimpleNamespace(
        hidden_size=2048,
        experts=SimpleNamespace(num_experts=num_experts, top_k=top_k),
        quantization=None,
    )
    config = EngineConfig(model="m", max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget)
    passes = padding_passes(config, token_counts=token_counts(model, 132))
    assert all(each.num_tokens <= token_budget for each in passes)

    def chosen_configs(num_tokens: int) -> Any:
        options = {"num_experts": num_experts, "exact": False}
        return [
            choose_expert_config(num_tokens * top_k, gated=gated, can_use_tma=can_use_tma, **options)
            for gated in (False, True)
            for can_use_tma in (False, True)
        ]

    reached = [chosen_configs(each.num_tokens) for each in passes]
    assert all(chosen_configs(num_tokens) in reached for num_tokens in range(1, token_budget + 1))


@pytest.mark.parametrize("has_wgmma", [False, True])
@pytest.mark.parametrize(
    ("columns", "depth"),
    [(4096, 4096), (6144, 4096), (28_672, 4096), (4096, 14_336), (1152, 896), (896, 4864)],
)
def test_padding_passes_reach_every_product_with_int4_weights(
    columns: int, depth: int, has_wgmma: bool
) -> None:
    fields: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096}
    fields |= {"num_key_value_heads": 8, "max_position_embeddings": 1024, "vocab_size": 512}
    model = ModelConfig.from_hf(
        {**fields, "quantization_config": describe("awq 128 zeros", [])},
        names={"norm_eps": "rms_norm_eps"},
        dtype=torch.float16,
        device="cpu",
    )
    config = EngineConfig(model="m", max_num_seqs=256, max_num_batched_tokens=2048)
    passes = padding_passes(config, decode_kinds(model, 132), token_counts(model, 132))

    def kernel(num_tokens: int) -> Any:
        options: Any = {"step": 64, "exact": False, "has_wgmma": has_wgmma}
        return choose_int4_config(num_tokens, columns, depth, **options)

    def kernels(counts: Iterable[int]) -> set[Any]:
        return {kernel(count) for count in counts}

    expected = kernels(range(1, 257))
    assert kernels(each.num_decodes for each in passes if not each.num_prefills) == expected
    prompts = {each.num_tokens for each in passes if each.num_prefills == 1 and not each.num_decodes}
    assert kernels(count for count in prompts if count <= 256) == expected


@pytest.mark.parametrize("num_processors", [78, 108, 132, 148])
def test_padding_passes_reach_products_in_halves(num_processors: int) -> None:
    def is_halved(num_tokens: int, width: int) -> bool:
        x, weight = (
            torch.empty(sizes, dtype=torch.bfloat16, device="meta")
            for sizes in ((num_tokens, 2 * width), (2 * width, width))
        )
        return adds_halves(x, Linear(weight, None))

    with meta_stands_for(GpuProperties((9, 0), num_processors)):
        for width in (1024, 2048, 4096):
            (count,) = token_counts(
                SimpleNamespace(hidden_size=width, experts=None, quantization=None), num_processors
            )  # type: ignore[arg-type]
            halved = [num_tokens for num_tokens in range(1, 2500) if is_halved(num_tokens, width)]
            assert not halved or halved[0] == count


@pytest.mark.parametrize("head_size", [64, 128])
def test_tunings_change_at_the_lengths_that_are_listed(head_size: int) -> None:
    tunings = [
        prefill_tuning(mean, head_size, torch.float16, (9, 0), is_describable=True) for mean in range(1, 2000)
    ]
    changes = {mean for mean in range(2, 2000) if tunings[mean - 1] != tunings[mean - 2]}
    assert changes <= set(TUNED_QUERY_LENS)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_every_token_is_progress_and_without_a_terminal_a_line_says_so_now_and_then(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    now, num_tokens = 100.0, 1000
    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(
        progress, "Console", lambda stderr: Console(stderr=stderr, force_terminal=is_terminal, width=100)
    )
    with progress.GenerationProgress(4, lambda: num_tokens) as shown:
        for moment, tokens, finished in ((104.0, 20, 0), (110.0, 40, 0), (111.0, 44, 2), (121.0, 84, 0)):
            now, num_tokens = moment, 1000 + tokens
            shown.update(finished)
        now, num_tokens = 125.0, 1100
    captured = capfd.readouterr()
    assert captured.out == ""
    if is_terminal:
        assert "2/4" in captured.err and "100 tokens, 4 tokens/s" in captured.err
        return
    assert captured.err.splitlines() == [
        "generating: 0 of 4 prompts finished, 40 tokens, 4 tokens/s",
        "generating: 2 of 4 prompts finished, 84 tokens, 4 tokens/s",
        "generating: 2 of 4 prompts finished, 100 tokens, 4 tokens/s",
    ]


def test_phases_without_a_terminal_have_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rose_backend.engine.progress")
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    for _ in progress.show_progress("compiling kernels", range(5)):
        now += 6.0
    assert caplog.messages == [
        "compiling kernels: 5",
        "compiling kernels: 2 of 5",
        "compiling kernels: 4 of 5",
        "compiling kernels: 5 took 30.0 s",
    ]


def test_progress_is_a_bar_on_terminals_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(
            progress,
            "Console",
            lambda stderr, is_terminal=is_terminal: Console(stderr=stderr, force_terminal=is_terminal),
        )
        with caplog.at_level(logging.INFO):
            assert list(progress.show_progress("making tea", (3, 4))) == [3, 4]
        captured = capfd.readouterr()
        assert captured.out == "" and ("making tea" in captured.err if is_terminal else captured.err == "")
        assert "making tea: 2 took" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_memory_utilization": 1.1},
            "gpu_memory_utilization: got 1.1, allowed is more than 0 and at most 1",
        ),
        ({"gpu_memory_utilization": "most"}, "gpu_memory_utilization: got 'most', allowed"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization: got nan, allowed"),
        ({"cpu_kvcache_space_gib": True}, "cpu_kvcache_space_gib: got True, allowed is a number above 0"),
        ({"cpu_kvcache_space_gib": float("inf")}, "cpu_kvcache_space_gib: got inf, allowed"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: got 0, allowed is an integer from 1 to"),
        ({"max_num_seqs": "8"}, "max_num_seqs: got '8', allowed is an integer from 1 to"),
        ({"block_size": 0}, "block_size: got 0, allowed is an integer from 1 to"),
        ({"max_model_len": 1}, "max_model_len: got 1, allowed is an integer from 2 to"),
        ({"dtype": "int8"}, "dtype: got 'int8', allowed are auto, float32, float16, bfloat16"),
        (
            {"speculative_config": "ngram"},
            "speculative_config: got 'ngram', allowed is an object with the fields",
        ),
        (
            {"speculative_config": N_GRAMS | {"temperature": "x"}},
            r"speculative_config: unknown field 'temperature' \(valid: method, num_speculative_tokens, model, prompt",
        ),
        (
            {"speculative_config": N_GRAMS | {"prompt_lookup_maxx": 1}},
            "speculative_config: unknown field 'prompt_lookup_maxx'; did you mean 'prompt_lookup_max'",
        ),
        (
            {"speculative_config": N_GRAMS | {"method": "medusa"}},
            "speculative_config.method: got 'medusa', allowed are ngram, ngram_gpu, eagle3",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": 3}},
            "speculative_config.method: got none, allowed are ngram, ngram_gpu",
        ),
        (
            {"speculative_config": {"method": "ngram"}},
            "speculative_config.num_speculative_tokens: got none or 0, allowed is an integer from 1 to 7",
        ),
        (
            {"speculative_config": N_GRAMS | {"num_speculative_tokens": 8}},
            "speculative_config.num_speculative_tokens: got 8, allowed is an integer from 1 to 7",
        ),
        (
            {"speculative_config": N_GRAMS | {"prompt_lookup_min": True}},
            "speculative_config.prompt_lookup_min: got True, allowed is an integer from 1 to 1024",
        ),
        (
            {"speculative_config": N_GRAMS | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}},
            "speculative_config.prompt_lookup_min: got 4, allowed are 1 to prompt_lookup_max, which is 3",
        ),
        (
            {"speculative_config": N_GRAMS | {"model": "x"}},
            "speculative_config.model: got 'x', allowed is none with method ngram",
        ),
        (
            {"speculative_config": N_GRAMS | {"method": "eagle3"}},
            "speculative_config.model: got none, allowed is a directory or a Hugging Face id of a head",
        ),
        (
            {"speculative_config": N_GRAMS | {"method": "eagle3", "model": 3}},
            "speculative_config.model: got 3, allowed is a directory or a Hugging Face id of a head",
        ),
        (
            {"speculative_config": N_GRAMS | {"method": "eagle3", "model": "\udcff"}},
            "speculative_config.model: got",
        ),
        (
            {"speculative_config": N_GRAMS | {"method": "eagle3", "model": "x", "prompt_lookup_max": 2}},
            "speculative_config.prompt_lookup_max: got 2, allowed is none with method eagle3",
        ),
    ],
)
def test_errors_name_field_value_and_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        EngineConfig(model="m", **options)


@pytest.mark.parametrize("model", ["", "/models/\udcff", None])
def test_a_model_has_a_name(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model: got .*, a directory or a Hugging Face id is needed"):
        EngineConfig(model=model)


@pytest.mark.parametrize(
    ("given", "lookup"),
    [({}, (5, 5)), ({"max": 4}, (4, 4)), ({"min": 2}, (2, 2)), ({"min": 2, "max": 3}, (2, 3))],
)
def test_drafts_have_the_defaults_of_vllm(given: dict[str, int], lookup: tuple[int, int]) -> None:
    fields = N_GRAMS | {f"prompt_lookup_{name}": number for name, number in given.items()}
    config = EngineConfig(model="m", speculative_config=fields)
    drafts = config.drafts
    assert (drafts.prompt_lookup_min, drafts.prompt_lookup_max, drafts.num_speculative_tokens) == (*lookup, 3)
    assert replace(config, seed=1).drafts == drafts
    line = dict(replace(ON_GPU, config=replace(config, max_num_batched_tokens=64)).lines())["drafts"]
    assert line == (
        f"3 a request in a step, by ngram: what followed the last {lookup[0]} to {lookup[1]} tokens before"
    )
    assert "drafts" not in dict(ON_GPU.lines())


def test_tokenizer_file_is_read_as_transformers_reads_it(tiny_model_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = (
        Tokenizer(tiny_model_path),
        AutoTokenizer.from_pretrained(str(tiny_model_path)).backend_tokenizer,
    )
    for text in (
        "The rose",
        "  two  ",
        "a<|endoftext|> b",
        "Die Rose blüht\n\n薔薇 🌹",
        "\x00\x7f",
        "don't 10,000!",
    ):
        ids = ours.encode(text)
        assert ids == theirs.encode(text).ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
