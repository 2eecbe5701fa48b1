"""Which block of the KV cache belongs to which sequence: integers only, no tensors."""

from quire.kvcache.cache import BlockTable, KVCache

__all__ = ["BlockTable", "KVCache"]
