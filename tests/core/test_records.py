"""What users rely on: errors and their exit codes, and quick imports."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import autobatch

ERRORS: dict[str, tuple[type[Exception], int]] = {
    "InputError": (ValueError, 2),
    "DoesNotFitError": (RuntimeError, 3),
    "RestartSmallerError": (RuntimeError, 77),
    "CheckpointError": (OSError, 1),
    "NonFiniteError": (ArithmeticError, 1),
}


def test_every_error_has_its_base_and_exit_code_and_survives_a_pickle() -> None:
    for name, (base, code) in ERRORS.items():
        error = getattr(autobatch, name)("one line")
        assert isinstance(error, base)
        assert isinstance(error, autobatch.AutobatchError)
        assert (error.exit_code, str(pickle.loads(pickle.dumps(error)))) == (code, "one line")
    codes = [autobatch.Interrupted("stopped", signal_number=number).exit_code for number in (2, 15)]
    assert codes == [130, 143]


@pytest.mark.program
def test_no_library_is_imported_before_something_needs_it_and_no_import_draws() -> None:
    code = (
        "import random, sys\n"
        "state = random.getstate()\n"
        "from autobatch import integrations\n"
        "assert 'torch' not in sys.modules\n"
        "from autobatch.integrations.transformers import plan\n"
        "assert not {'transformers', 'lightning', 'accelerate'} & set(sys.modules)\n"
        "assert random.getstate() == state\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
