"""One step on the device: model runner, decode steps as CUDA graphs, steps in flight, and reading their tokens."""
