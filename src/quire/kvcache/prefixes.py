"""Names for block contents: each full block is known by a hash of its tokens and all before it."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def root_hash(salt: str) -> bytes:
    """Where a chain starts. Salted per API key, so that no key can probe another's prompts."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block that follows the blocks `parent` stands for."""
    hasher = blake2b(parent, digest_size=_DIGEST_BYTES)
    hasher.update(array("I", tokens).tobytes())
    return hasher.digest()
