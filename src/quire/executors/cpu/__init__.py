"""The CPU executor: quantised batches in native code, the same bits whatever the batch.

`native` imports the module and makes its sample requests, `lowering` makes a decoder of a model,
`executor` runs steps on it.
"""

from quire.executors.cpu.native import check_native_module, check_unit, has_native_module, units

__all__ = ["check_native_module", "check_unit", "has_native_module", "units"]
