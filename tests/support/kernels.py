"""Whether kernels compute anything: on the stub GPU they do not."""

from __future__ import annotations

import os

import pytest

IS_STUB = "STUB_GPU_STATE" in os.environ
"""Whether this process runs on the stub of `tests.stub_gpu`."""
needs_kernels = pytest.mark.skipif(IS_STUB, reason="kernels compute nothing on the stub GPU")
"""Mark of a test that depends on what kernels compute, or on the time that they take."""
only_stub = pytest.mark.skipif(not IS_STUB, reason="needs the stub GPU: python -m tests.stub_gpu -- pytest")
"""Mark of a test that sets what the machine has, or what fails."""
