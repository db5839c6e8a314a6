# vLLM's official image with Rose in it. Build the wheel first: make wheel, or pip wheel --no-deps -w dist .
#
#   docker build -t vllm-rose .
#   docker run --gpus all --ipc=host -p 8000:8000 vllm-rose MODEL --attention-backend rose
#
# The entry point is the base image's, `vllm serve`. To compile the kernels of `rose serve` while the image is built, which
# needs no GPU, name the models, and the compute capability of the GPUs that will run them. Models that ask for a token of
# Hugging Face's get it from a file, which does not stay in the image:
#
#   docker build -t vllm-rose --build-arg WARMUP_MODELS="Qwen/Qwen3-0.6B Qwen/Qwen3-8B" \
#     --build-arg COMPUTE_CAPABILITY=9.0 --secret id=hf_token,src=token.txt .
#   docker run --gpus all --ipc=host -p 8000:8000 --entrypoint rose vllm-rose serve Qwen/Qwen3-8B --host 0.0.0.0
ARG VLLM_VERSION=0.32.0
FROM vllm/vllm-openai:v${VLLM_VERSION}

# As root, as the base image is until here. What it has installed satisfies Rose's ranges, and stays as it is.
COPY dist/rose_backend-*.whl /tmp/rose/
RUN uv pip install --system --no-cache "$(echo /tmp/rose/*.whl)[serve]" && rm -r /tmp/rose

# One place for compiled kernels, for whoever may run the container: any user in group 0.
ENV TRITON_CACHE_DIR=/opt/rose/triton_cache
RUN install -d -o 2000 -g 0 -m 2775 "$TRITON_CACHE_DIR"

# The base image's user vllm. A number, so that Kubernetes can tell that it is not root.
USER 2000:0
WORKDIR /home/vllm

# Another VLLM_VERSION than Rose supports ends the build here, by name.
RUN python3 -c 'import sys; from importlib.metadata import version; \
    from rose_backend.vllm_plugin.registration import SUPPORTED_VERSIONS, is_supported; found = version("vllm"); \
    is_supported(found) or sys.exit(f"VLLM_VERSION: got {found}, Rose supports {SUPPORTED_VERSIONS}")' \
    && rose env

ARG WARMUP_MODELS=""
ARG COMPUTE_CAPABILITY="9.0"
RUN --mount=type=secret,id=hf_token,uid=2000 \
    export HF_TOKEN="$(cat /run/secrets/hf_token 2>/dev/null)"; \
    for model in $WARMUP_MODELS; do \
        rose warmup "$model" --compute-capability "$COMPUTE_CAPABILITY" || exit 1; \
    done
