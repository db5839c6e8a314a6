"""A copy of the index of full blocks, built from cache events alone."""

from __future__ import annotations

from rose_backend.block_manager import BlockManager, BlockRemoved, BlockStored
from tests.block_manager.oracle_books import Books, Prefix, agree


class EventMirror:
    """Builds an index of full blocks from the manager's events alone, as a router outside would."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.prefix_of: dict[bytes, Prefix] = {}
        self.block_of: dict[bytes, int] = {}

    def follow(self, books: Books) -> None:
        """Apply the new events; then the index must be that of the oracle."""
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                parent = (
                    (event.namespace, ()) if event.parent_hash is None else self.prefix_of[event.parent_hash]
                )
                agree("namespace of an event's parent", parent[0], event.namespace)
                self.prefix_of[event.block_hash] = (event.namespace, (*parent[1], *event.token_ids))
                assert event.block_hash not in self.block_of, "stored twice"
                self.block_of[event.block_hash] = event.block_id
            elif isinstance(event, BlockRemoved):
                del self.block_of[event.block_hash]
            else:
                self.block_of.clear()
        expected = {}
        for block_id, block in books.blocks.items():
            if block.prefix is not None and len(block.tokens) == books.block_size:
                expected[block_id] = (block.prefix[0], (*block.prefix[1], *block.tokens))
        got = {block_id: self.prefix_of[digest] for digest, block_id in self.block_of.items()}
        agree("full blocks by events", got, expected)
