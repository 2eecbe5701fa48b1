"""The CPU executor: quantised batches in native code, the same bits whatever the batch.

Import `quire.executors.cpu.executor` only where `native_module()` did not raise.
"""

from quire.executors.cpu.native import check_unit, has_native_module, native_module, units

__all__ = ["check_unit", "has_native_module", "native_module", "units"]
