"""Which block of the key-value cache belongs to whom: integers only, no tensors."""

from quire.kvcache.cache import BlockTable, KVCache

__all__ = ["BlockTable", "KVCache"]
