"""OpenAI-compatible HTTP over the standalone engine.

Reading order: ``serve`` (start and stop), ``app`` (routes), ``gate`` (what every request passes first), ``generation``
(from a checked request through the engine), ``answers`` (engine outputs as OpenAI's JSON, whole or as events). The
engine runs in a process of its own (``engine_client`` is this end, ``engine_process`` the other, ``engine_messages``
what they say), or in this one (``inproc_engine``).
"""
