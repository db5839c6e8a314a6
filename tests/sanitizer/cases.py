"""Every kernel of the package on small inputs, on a CPU and on a CUDA device."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from rose_backend import kernels
from rose_backend.kernels import gpu
from rose_backend.kernels.sampling_tensors import SamplingTensors
from tests.kernels.test_sample import make_params, random_case
from tests.sanitizer.planted import plant
from tests.support.paged_inputs import PagedInputs, build_paged_inputs

Case = Callable[[str], list[torch.Tensor]]
"""Given a device, does the same work there and returns its results."""

HALF, BFLOAT16, FLOAT32, FLOAT8_DTYPE = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
TOLERANCE = {HALF: 5e-3, BFLOAT16: 4e-2, FLOAT32: 1e-4, FLOAT8_DTYPE: 0.0}
EPS = 1e-5


def moved(inputs: PagedInputs, device: str) -> PagedInputs:
    """Return the inputs on a device, the caches still views of one storage."""
    tensors = {
        field.name: getattr(inputs, field.name).to(device)
        for field in fields(inputs)
        if isinstance(getattr(inputs, field.name), torch.Tensor)
    }
    for name in ("key_cache", "value_cache"):
        view = getattr(inputs, name)
        tensors[name] = tensors["storage"].as_strided(view.shape, view.stride(), view.storage_offset())
    return replace(inputs, **tensors)


def attention(
    lengths: list[int],
    query_lens: list[int] | None = None,
    *,
    prefill: bool = False,
    masked: bool = False,
    **shape: Any,
) -> Case:
    """Decode attention, with one new token per row where ``query_lens`` is None, or prefill attention."""

    def run(device: str) -> list[torch.Tensor]:
        inputs = moved(build_paged_inputs(lengths, query_lens, layout="vllm", **shape), device)
        out = torch.zeros_like(inputs.query)
        arguments = {
            "query": inputs.query,
            "new_key": inputs.new_key,
            "new_value": inputs.new_value,
            "key_cache": inputs.key_cache,
            "value_cache": inputs.value_cache,
            "block_table": inputs.block_table,
            "num_computed_tokens": inputs.num_computed_tokens,
            "scale": inputs.query.shape[-1] ** -0.5,
            "out": out,
            "key_scale": inputs.key_scale,
            "value_scale": inputs.value_scale,
        }
        if masked:
            per_head = torch.linspace(-1, 1, inputs.query.shape[1]).to(device)
            arguments |= {"sinks": per_head, "alibi_slopes": per_head.abs() / 8}
            arguments |= {"sliding_window": 133, "logits_soft_cap": 2.0}
        if query_lens is not None:
            arguments["query_start_loc"] = inputs.query_start_loc
        if prefill:
            kernels.paged_prefill(**arguments)
        else:
            kernels.paged_decode(**arguments, max_query_len=max(query_lens or [1]))
        return [out, inputs.storage]

    return run


def write_kv(**shape: Any) -> Case:
    """Slots of three rows, one of them padding."""

    def run(device: str) -> list[torch.Tensor]:
        inputs = moved(
            build_paged_inputs([5, 0, -1], [9, 1, 2], head_size=80, layout="vllm", **shape), device
        )
        kernels.write_kv(
            inputs.new_key,
            inputs.new_value,
            inputs.key_cache,
            inputs.value_cache,
            inputs.slot_mapping,
            key_scale=inputs.key_scale,
            value_scale=inputs.value_scale,
        )
        return [inputs.storage]

    return run


def clone(pairs: list[tuple[int, int]], *, ids_on_device: bool) -> Case:
    """Copy blocks of several layers."""

    def run(device: str) -> list[torch.Tensor]:
        cache = torch.randn(3, 2, 9, 16, 3, 64, generator=torch.Generator().manual_seed(0)).half().to(device)
        ids = torch.tensor(pairs, dtype=torch.int32, device=device if ids_on_device else "cpu")
        kernels.block_clone(cache, *ids.unbind(1), block_dim=2)
        return [cache]

    return run


def norms(num_tokens: int, width: int) -> Case:
    """Norms with and without the residual add, and the element-wise parts of the MLP."""

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, residual = torch.randn(2, num_tokens, width, generator=generator).half().to(device)
        weight, bias = torch.randn(2, width, generator=generator).half().to(device)
        return [
            kernels.layer_norm(x, weight, bias, EPS),
            *kernels.add_layer_norm(x, residual, weight, bias, EPS),
            kernels.rms_norm(x, weight, EPS),
            *kernels.add_rms_norm(x, residual, weight, EPS),
            kernels.bias_gelu(x.clone(), bias),
            kernels.bias_residual(x.clone(), bias, residual),
        ]

    return run


def linear(num_rows: int, depth: int, columns: int, *, norm: bool) -> Case:
    """A small-batch product with a norm and GELU, or with a residual."""

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(2)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).half().to(device)

        weight, bias = random(columns, depth, scale=depth**-0.5), random(columns)
        norm_weight, norm_bias = (random(depth), random(depth)) if norm else (None, None)
        layer = kernels.pack_linear(weight, bias, norm_weight=norm_weight, norm_bias=norm_bias, eps=EPS)
        residual = None if norm else random(num_rows, columns)
        return [kernels.small_batch_linear(random(num_rows, depth), layer, gelu=norm, residual=residual)]

    return run


def on_device(params: SamplingTensors, device: str) -> SamplingTensors:
    """Return the same parameters on a device."""
    tensors = {field.name: getattr(params, field.name) for field in fields(params)}
    return replace(
        params,
        **{name: value.to(device) for name, value in tensors.items() if isinstance(value, torch.Tensor)},
    )


def sampler(num_rows: int, vocab_size: int) -> Case:
    """Rows with every mix of filters and penalties."""

    def run(device: str) -> list[torch.Tensor]:
        logits, params = random_case(num_rows, vocab_size, seed=3)
        output = kernels.sample(logits.to(device), on_device(params, device))
        return [output.token_ids, output.logprob, output.top_logprobs]

    return run


def greedy(device: str) -> list[torch.Tensor]:
    """Rows that need no draw."""
    logits = torch.randn(5, 1009, generator=torch.Generator().manual_seed(4))
    return [kernels.sample(logits.to(device), on_device(make_params(5, temperature=0.0), device)).token_ids]


def head(num_rows: int, vocab_size: int) -> Case:
    """The head and the sampler in one, on products that are exact in any order."""

    def run(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        hidden, weight = (
            torch.randint(-1, 2, shape, generator=generator).half().to(device)
            for shape in ((num_rows, 129), (vocab_size, 129))
        )
        params = on_device(make_params(num_rows, temperature=[0.0, 0.7] * (num_rows // 2)), device)
        tokens = kernels.lm_head_sample(
            hidden, weight, temperature=params.temperature, seed=params.seed, position=params.position
        )
        return [tokens]

    return run


GPT2 = {"num_query_heads": 12, "num_kv_heads": 12, "head_size": 64, "block_size": 16, "dtype": HALF}
GROUPED = {"num_query_heads": 8, "num_kv_heads": 2, "head_size": 128, "block_size": 16, "dtype": BFLOAT16}
ODD = {"num_query_heads": 4, "num_kv_heads": 2, "head_size": 80, "block_size": 48, "dtype": FLOAT32}
FLOAT8 = {"cache_dtype": FLOAT8_DTYPE, "key_scale": 0.7, "value_scale": 1.3}
LENGTHS = [0, 15, 16, -1, 130, 700]

CASES: dict[str, Case] = {
    "decode GPT-2": attention(LENGTHS, **GPT2),
    "decode grouped": attention([3, 1500], **GROUPED),
    "decode masked": attention([3, 1500], masked=True, **GROUPED),
    "decode odd": attention(LENGTHS, **ODD),
    "decode several tokens": attention([0, 14, -1, 300], [4, 3, 2, 0], **GPT2),
    "decode float8": attention(LENGTHS, **GPT2, **FLOAT8),
    "prefill GPT-2": attention([0, 40, -1, 16], [130, 33, 2, 1], prefill=True, **GPT2),
    "prefill grouped": attention([0, 200], [70, 40], prefill=True, **GROUPED),
    "prefill masked": attention([0, 200], [70, 40], prefill=True, masked=True, **GROUPED),
    "prefill odd": attention([7, 0], [33, 17], prefill=True, **ODD),
    "prefill float8": attention([0, 40], [70, 33], prefill=True, **GPT2, **FLOAT8),
    "write_kv": write_kv(),
    "write_kv float8": write_kv(**FLOAT8),
    "clone, independent": clone([(1, 5), (2, 6), (3, 0)], ids_on_device=False),
    "clone, cycle": clone([(1, 2), (2, 3), (3, 1), (8, 0)], ids_on_device=True),
    "norms": norms(5, 768),
    "norms, odd": norms(3, 129),
    "linear, 1 row": linear(1, 801, 203, norm=True),
    "linear, 5 rows": linear(5, 801, 203, norm=True),
    "linear, split": linear(5, 3072, 203, norm=False),
    "linear, 33 rows": linear(33, 801, 203, norm=False),
    "sampler": sampler(24, 5003),
    "sampler, large": sampler(3, 50_257),
    "greedy": greedy,
    "head, 2 rows": head(2, 1009),
    "head, 70 rows": head(70, 5003),
}


def difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Say how two results differ beyond rounding, or None. Not-a-numbers have to be in the same places."""
    actual = actual.cpu()
    if not actual.is_floating_point():
        wrong = (actual != expected).sum().item()
        return f"{wrong} of {expected.numel()} numbers differ" if wrong else None
    tolerance = TOLERANCE[expected.dtype]
    actual, expected = actual.double(), expected.double()
    if not torch.equal(actual.isnan(), expected.isnan()):
        return "not-a-numbers in other places"
    error = (actual - expected).nan_to_num(0.0).abs().max().item()
    allowed = tolerance * max(1.0, expected.nan_to_num(0.0).abs().max().item())
    return None if error <= allowed else f"off by {error:.2e}, at most {allowed:.2e} allowed"


def package_kernels() -> set[str]:
    """Return the names of all kernels that the package launches."""
    modules = [f"{gpu.__name__}.{module.name}" for module in pkgutil.iter_modules(gpu.__path__)]
    return {
        name
        for module in modules
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def recorded_launches(names: set[str]) -> Any:
    """Return a context in which the name of every launched kernel is added to ``names``."""
    run = JITFunction.run

    def record(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        names.add(self.__name__)
        return run(self, *args, **kwargs)

    return mock.patch.object(JITFunction, "run", record)


def chosen(match: str) -> Iterator[tuple[str, Case]]:
    """Yield the cases whose name contains ``match``."""
    yield from ((name, case) for name, case in CASES.items() if match in name)


def run_cases(match: str, planted: str | None) -> int:
    """Run the cases; the status is 1 if a result is wrong or, with all cases chosen, a kernel was never launched."""
    problems = []
    launched: set[str] = set()
    with recorded_launches(launched):
        for name, case in chosen(match):
            expected = case("cpu")
            for index, (actual, wanted) in enumerate(zip(case("cuda"), expected, strict=True)):
                wrong = difference(actual, wanted)
                if wrong is not None:
                    problems.append(f"{name}: result {index}: {wrong}")
            print(f"ran {name}", flush=True)
    if planted:
        plant(planted)
    if not match:
        problems += [f"never launched: {name}" for name in sorted(package_kernels() - launched)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(launched)} kernels, {len(problems)} problems")
    return int(bool(problems))
