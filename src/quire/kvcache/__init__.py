"""Which block of the key-value cache belongs to whom: integers only, no tensors."""

from quire.kvcache.cache import KVCache, SequenceBlocks

__all__ = ["KVCache", "SequenceBlocks"]
