"""Steps that are replayed whole, by vLLM's model runner V2."""
