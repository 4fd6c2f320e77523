"""Kernels in Triton for CUDA devices; importing this package alone imports no Triton."""
