"""The kernels. cuda/gemm.py launches gemm.py or, on Hopper, hopper_gemm.py (with
dequantize.py); cuda/attention.py launches attention.py or hopper_attention.py and, in
large steps, hopper_prefill.py or prefill.cu (by cuda/cuda_source.py); cuda/decoder.py launches
layers.py. Each runs on the current stream.

Arguments that belong together are named tuples. A field of one cannot be called `values` or `type`:
Triton's own tuples have these attributes.
"""
