"""From options to a warmed-up engine: checkpoint, KV pool, compilation, graph capture, and the start-up report."""
