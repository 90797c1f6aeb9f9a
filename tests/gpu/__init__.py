"""Tests on a CUDA GPU, or on the stub of `tests.stub_gpu`. Some need the stub: `tests.support.kernels`."""
