"""What the next step computes: the queue and admission, block look-ahead, deferred commits."""
