"""Steady decode steps of model runner V2, replayed whole: inputs, layers, head, draw and the update after it."""
