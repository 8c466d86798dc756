"""The home of the Triton kernels for the neural memory (Section 3 of the paper).

A module here imports torch and triton only and keeps the names and signatures of `titans_hf.memory_ops`. No kernel is
shipped yet, so the torch form serves every device.
"""
