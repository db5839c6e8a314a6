"""Operations of a few reads and one write per number: embeddings, norms, activations and rotary positions."""
