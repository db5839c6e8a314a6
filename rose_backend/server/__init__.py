"""OpenAI-compatible HTTP over the standalone engine.

Reading order: ``serve`` (start and stop), ``app`` (routes), ``gate`` (what every request passes first), ``generation``
(from a checked request through the engine), ``answers`` (engine outputs as OpenAI's JSON, whole or as events).
"""
