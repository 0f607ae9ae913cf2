"""The kernels, one a file, in Triton's language."""
