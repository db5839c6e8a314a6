"""The standalone engine: continuous batching over rose_backend's block manager, kernels and models. Never imports vllm.

Reading order: ``sampling_params``, ``request``, ``row_state`` (all per-row arrays), ``scheduler`` (what a step
computes), ``model_runner`` (the step on the device), ``core`` (one step from schedule to outputs), ``llm``,
``async_engine``.
"""
