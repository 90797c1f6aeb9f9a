"""Tests on a CUDA GPU, or on the stub of `tests.stub_gpu`; some on the stub alone (`tests.support.kernels`)."""
