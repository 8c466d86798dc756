"""Triton kernels for the neural memory (Section 3 of the paper).

`scan.scan_chunks` has the name and the signature of the function in `titans_hf.memory_ops` that it speeds up, and that
function is its definition. Modules here import torch and triton only; triton itself is imported where a kernel is
launched, so that everything else can be read and tested without it.
"""
