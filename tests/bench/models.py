"""What the benchmarks' tests share."""

TINY_KV = "16MiB"  # room enough for the tiny shape, touched fast
