"""From token ids to outputs: the output thread, stop strings, log-probabilities."""
