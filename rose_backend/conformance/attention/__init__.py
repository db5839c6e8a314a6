"""One attention layer of any vLLM backend against attention in float64."""
