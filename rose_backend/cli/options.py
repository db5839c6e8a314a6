"""The command line's options, made from the fields of ``EngineConfig`` and ``SamplingParams``."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from typing import Any, NoReturn, TypeAlias

from rose_backend.config import (
    DEVICES,
    DTYPES,
    GENERATION_CONFIGS,
    KV_CANARY_MODES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    SWITCH_NAMES,
    EngineConfig,
)
from rose_backend.engine.sampling_params import SamplingParams

EXIT_USAGE = 2

Commands: TypeAlias = "argparse._SubParsersAction[RoseParser]"

_ENGINE_HELP = {
    "dtype": "number type of weights and KV cache; auto: float32 on a CPU, the checkpoint's own on a GPU, "
    "but bfloat16 for float32 checkpoints, as in vLLM",
    "device": "where to run; auto: a GPU where there is one",
    "block_size": "tokens per KV block",
    "max_num_seqs": "sequences that may run at once; each of a request's n completions counts",
    "max_num_batched_tokens": "tokens one step may compute, prompts and decodes together (default: by device)",
    "max_model_len": "prompt plus output in tokens (default: the model's window)",
    "num_blocks": "KV blocks to allocate (default: sized from memory)",
    "gpu_memory_utilization": "share of the GPU's memory for weights, activations and KV pool together",
    "cpu_kvcache_space_gib": "memory of the KV pool on a CPU in GiB, at most",
    "num_threads": "threads that a step's operations are split over on a CPU (default: OMP_NUM_THREADS if set, "
    "otherwise one below 64 Mi weights, then one per 16 Mi, at most one per core)",
    "run_ahead": "decode steps to start before the tokens of the one before are read; 0: none (default: 1 on a GPU)",
    "seed": "seeds requests that have no seed",
    "generation_config": "sampling parameters that are not given; auto: those of the model's generation_config.json, "
    "none: rose's own; its end tokens count either way",
    "max_queue_size": "requests that may wait; one more is refused",
    "speculative_config": "drafts that decode steps verify, such as "
    '\'{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 2}\' or, with an '
    'EAGLE-3 head, \'{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 3}\'; '
    "texts are the same without (default: no drafts)",
    "adaptive_drafts": "make as many drafts in a step as give the most tokens per second, as measured (default: on)",
    "enable_lora": "take LoRA adapters, whose slots are allocated at the start (default: off)",
    "max_loras": "LoRA slots, at most 8: adapters that are loaded at once",
    "max_lora_rank": "largest rank of an adapter, at most 64, for which all slots have room",
    "kv_canary": "check K/V every 16 steps for writes that nobody may make and for values computed from free "
    "blocks; log: a line for each check that finds some, raise: the engine ends; reads the whole KV pool",
    "fused_kv_append": "attention stores new keys and values itself",
    "fused_mlp": "bias + GELU, bias + residual and SiLU * up as one operation each",
    "fused_sampler": "the one-pass sampler",
    "fused_add_layernorm": "residual add and LayerNorm or RMSNorm as one operation",
    "cuda_graph": "replay decode steps from CUDA graphs where device and kernels allow it",
    "chunked_prefill": "split long prompts over several steps",
    "prefix_cache": "reuse keys and values of earlier requests that share a prefix",
    "token_granular_hits": "let prefix hits end at any token; off: at block borders only",
}
_SAMPLING_HELP = {
    "n": "completions of each prompt",
    "max_tokens": "tokens to generate at most; 'none' fills the window",
    "min_tokens": "no stop before this many tokens",
    "temperature": f"0 to {MAX_TEMPERATURE:g}; 0 takes the most likely token",
    "top_k": "draw among the k most likely tokens; 0: off",
    "top_p": "above 0 up to 1; draw among the most likely tokens that reach this probability together",
    "min_p": "0 to 1; leave out tokens less likely than this share of the most likely one",
    "seed": "seed of the draws (default: derived from --seed and the number of the request)",
    "repetition_penalty": f"{MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}; above 1: tokens of prompt and "
    "output become less likely",
    "presence_penalty": f"-{MAX_PENALTY:g} to {MAX_PENALTY:g}; subtracted from the logit of tokens the output contains",
    "frequency_penalty": f"-{MAX_PENALTY:g} to {MAX_PENALTY:g}; subtracted once for each time the output contains the "
    "token",
    "logit_bias": 'token ids and numbers that are added to their logits, such as {"5": -2.5}',
    "allowed_token_ids": "token id; only those given are drawn; may be given several times",
    "bad_words": "word that is not drawn; may be given several times",
    "stop": "string that ends the text; may be given several times",
    "stop_token_ids": "token id that ends the text; may be given several times",
    "ignore_eos": "continue after the end-of-text token",
    "include_stop_str_in_output": "keep the stop string at the end of the text",
    "logprobs": "log-probabilities of this many most likely tokens (in the output file)",
    "prompt_logprobs": "the same of the prompt's tokens; they are computed without cached prefixes",
    "skip_special_tokens": "leave special tokens out of the text",
    "structured_outputs": 'what the text is to be, such as \'{"choice": ["red", "white"]}\'',
}


def _int_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


_int_or_none.__name__ = "int"  # argparse puts the name into its error message


def _json(text: str) -> Any:
    return json.loads(text)


_json.__name__ = "JSON"

# How argparse reads fields that are neither numbers nor switches.
_ENGINE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "dtype": {"choices": DTYPES},
    "device": {"choices": DEVICES},
    "generation_config": {"choices": GENERATION_CONFIGS},
    "speculative_config": {"type": _json, "metavar": "JSON"},
    "kv_canary": {"choices": KV_CANARY_MODES},
}
_SAMPLING_ARGUMENTS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": _int_or_none, "metavar": "N"},
    "logit_bias": {"type": json.loads, "metavar": "JSON"},
    "allowed_token_ids": {"action": "append", "type": int, "metavar": "ID"},
    "bad_words": {"action": "append", "metavar": "TEXT"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": {"action": "append", "type": int, "metavar": "ID"},
    "structured_outputs": {"type": _json, "metavar": "JSON"},
}
_PREFIX = "sampling_"


class RoseParser(argparse.ArgumentParser):
    """Reports a mistake as one line on stderr with exit code 2, and names the option that was probably meant."""

    def __init__(self, **options: Any) -> None:
        # A shortened option would stop working as soon as a longer one begins like it.
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        print(f"rose: error: {message}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)

    def option_names(self) -> list[str]:
        """Return every option of this parser and of its commands."""
        names: list[str] = []
        for action in self._actions:
            names += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                names += [name for parser in action.choices.values() for name in parser.option_names()]
        return names


def value_arguments(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return how argparse reads a field that is a number or a switch."""
    if field.type == "bool":
        return {"action": argparse.BooleanOptionalAction}
    return {"type": float if "float" in str(field.type) else int, "metavar": "N"}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add one option per field of ``EngineConfig`` but ``model``."""
    group = parser.add_argument_group("engine")
    switches = parser.add_argument_group("parts, each of which can be switched off alone")
    for field in dataclasses.fields(EngineConfig):
        if field.name != "model":
            (switches if field.name in SWITCH_NAMES else group).add_argument(
                option_of(field.name),
                default=field.default,
                help=_with_default(
                    _ENGINE_HELP[field.name], "on" if field.default is True else field.default
                ),
                **_ENGINE_ARGUMENTS.get(field.name) or value_arguments(field),
            )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add one option per field of ``SamplingParams``."""
    group = parser.add_argument_group(
        "sampling", "The model's generation_config.json may set other defaults, see --generation-config."
    )
    for field in dataclasses.fields(SamplingParams):
        group.add_argument(
            # The engine has a seed as well.
            option_of("sampling_seed" if field.name == "seed" else field.name),
            dest=_PREFIX + field.name,
            default=argparse.SUPPRESS,
            help=_with_default(_SAMPLING_HELP[field.name], field.default),
            **_SAMPLING_ARGUMENTS.get(field.name) or value_arguments(field),
        )


def engine_config(model: str, args: argparse.Namespace) -> EngineConfig:
    """Return the configuration that a parsed command line gives."""
    names = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    return EngineConfig(model=model, **{name: getattr(args, name) for name in names})


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ``SamplingParams`` fields that a parsed command line gives."""
    names = {_PREFIX + field.name: field.name for field in dataclasses.fields(SamplingParams)}
    return {names[dest]: value for dest, value in vars(args).items() if dest in names}


def unknown_option_message(unknown: list[str], parser: RoseParser) -> str:
    """Say which arguments are unknown, and which option was probably meant, or the release that removed it."""
    hint = ""
    for argument in unknown:
        flag = argument.partition("=")[0]
        for name, reason in EngineConfig.removed_options.items():
            if flag in (option_of(name), option_of(f"no_{name}")):
                return f"{flag}: {reason}"
        close = difflib.get_close_matches(flag, parser.option_names(), n=1, cutoff=0.6)
        if argument.startswith("-") and close:
            hint = f"; did you mean {close[0]}?"
            break
    return f"unrecognized arguments: {' '.join(unknown)}{hint}"


def option_of(name: str) -> str:
    """Return the command line's spelling of a field's name."""
    return "--" + name.replace("_", "-")


def _with_default(text: str, default: object) -> str:
    if default is None or isinstance(default, bool) or "default" in text:
        return text
    return f"{text} (default: {default})"
