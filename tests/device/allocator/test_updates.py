"""Operators in place that leave every storage as it is."""

from __future__ import annotations

import pytest
import torch

from autobatch.device.allocator.tracker import UPDATES


@pytest.mark.parametrize("operator", sorted(UPDATES, key=str), ids=str)
def test_an_update_returns_its_first_argument_with_the_same_storage(operator):
    x = torch.ones(4)
    before = x.untyped_storage()._cdata, x.untyped_storage().nbytes()
    needed = operator._schema.arguments[1:]
    values = [x.clone() if str(one.type) == "Tensor" else 1 for one in needed if not one.has_default_value()]
    assert operator(x, *values).data_ptr() == x.data_ptr()
    assert (x.untyped_storage()._cdata, x.untyped_storage().nbytes()) == before
