"""Pictures of KV blocks: a demonstration of copy-on-write, and a live view of a running engine's pool.

``demo`` runs a real ``BlockManager`` and records frames of ``view_model``; ``terminal`` and ``page`` draw the same
frames. ``metrics`` reads an engine's counters over HTTP; ``live`` draws them.
"""
