"""Measures quire and shows what was measured: the command `quire bench`, of the extra `bench`."""
