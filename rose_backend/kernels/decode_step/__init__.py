"""Inputs of a step from the state of its requests, and that state after the step."""
