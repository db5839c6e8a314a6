"""Pictures of KV blocks: a demonstration of copy-on-write, and the pool of a running engine."""
