"""The CUDA executor: block weights at tensor-core speed, with the same bits at every batch size."""

from quire.executors.cuda.decoder import KVType
from quire.executors.cuda.device import require_gpu
from quire.executors.cuda.executor import CudaConfig, CudaExecutor, check_fits
from quire.executors.cuda.memory import free_bytes, limit_memory

__all__ = [
    "CudaConfig",
    "CudaExecutor",
    "KVType",
    "check_fits",
    "free_bytes",
    "limit_memory",
    "require_gpu",
]
