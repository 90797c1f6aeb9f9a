"""States come back as they were written, the library of safetensors reads them, and nothing else is read."""

from __future__ import annotations

import io
import json
import math
import struct
import warnings
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor, nn

from autobatch.training.checkpoints.state_file import pack, read_state_file, write_state_file


def written(state) -> bytes:
    file = io.BytesIO()
    write_state_file(file, state)
    return file.getvalue()


def read(content: bytes):
    return read_state_file(io.BytesIO(content))


def are_alike(one, other) -> bool:
    """Compare values, their classes, and of tensors also their bits and their order in memory."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and one.layout == other.layout
        if one.layout is torch.sparse_coo:
            return same and are_alike(*[(x._indices(), x._values()) for x in (one, other)])
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)]
        return same and one.stride() == other.stride() and torch.equal(*bits)
    if isinstance(one, float):
        if math.isnan(one):
            return math.isnan(other)
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return vars_of(one) == vars_of(other) and are_alike([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return one == other


def vars_of(value) -> dict:
    return getattr(value, "__dict__", {})


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3]), 1j, Counter({3: 2}), {1, "a"}])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.sampled_from(["a", "$tensor", "$"]), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_plain_values_come_back_as_they_were(value) -> None:
    assert are_alike(read(written({"it": value}))["it"], value)


TENSORS = {
    "empty": torch.empty(0, 3),
    "number": torch.tensor(math.nan),
    "bf16": torch.randn(3, 5).bfloat16(),
    "bool": torch.tensor([True, False]),
    "transposed": torch.arange(12).reshape(3, 4).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": torch.arange(10)[::2].clone(),
    "uint32": torch.arange(5).to(torch.uint32),
    "complex": torch.randn(2, 3, dtype=torch.complex128),
    "8 bits": torch.randn(7).to(torch.float8_e4m3fn),
}
with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns without it
    TENSORS["sparse"] = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 3.0], (4,))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_bit_for_bit(name: str) -> None:
    found = read(written({"it": TENSORS[name], "also": [TENSORS[name]]}))
    assert are_alike(found["it"], TENSORS[name])
    assert are_alike(found["also"][0], TENSORS[name])


def test_tensors_are_read_on_the_cpu_whatever_the_default_device_is() -> None:
    content = written({"it": torch.ones(3)})
    with torch.device("meta"):
        assert torch.equal(read(content)["it"], torch.ones(3, device="cpu"))


def test_views_are_kept_by_what_they_show() -> None:
    whole = torch.arange(1000.0)
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    content = written({"part": whole[::7], "expanded": whole[:1].expand(3, 4), "conjugate": conjugate})
    found = read(content)
    assert torch.equal(found["part"], whole[::7])
    assert torch.equal(found["expanded"], torch.zeros(3, 4))
    assert torch.equal(found["conjugate"], conjugate)
    assert len(content) < 2000


def test_tied_tensors_are_written_once_and_stay_tied() -> None:
    tensor = torch.randn(100)
    found = read(content := written({"one": tensor, "other": nn.Parameter(tensor)}))
    assert found["one"] is found["other"]
    assert len(content) < 800


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    found = read(written({"model": state}))["model"]
    assert are_alike(found, state)
    assert found._metadata == state._metadata


def test_the_library_of_safetensors_reads_the_tensors() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    found = load(written({"model": model.state_dict(), "odd": torch.ones(3, dtype=torch.bool)}))
    values = [*model.state_dict().values(), torch.ones(3, dtype=torch.bool)]
    assert len(found) == len(values)
    assert all(torch.equal(found[str(number)], value) for number, value in enumerate(values))


class Odd:
    pass


class OddTensor(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Odd(), r"test_state_file\.Odd"),
        (Odd, r"builtins\.type"),
        (len, "builtin_function"),
        (torch.ones(2).as_subclass(OddTensor), "OddTensor"),
        (frozenset({1}), "frozenset"),
    ],
)
def test_other_objects_are_refused_by_their_class(value, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        pack({"deep": [(value,)]})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quint8"),
    ],
)
def test_a_tensor_of_more_than_its_bytes_is_refused(make, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # both are in beta, or about to be removed
        tensor = make()
    with pytest.raises(TypeError, match=name):
        pack({"it": tensor})


def header(content: bytes) -> tuple[dict, bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def changed(change) -> bytes:
    """Return a file of a state whose header was changed."""
    entries, rest = header(written({"a": torch.ones(3), "b": (1, torch.zeros(2, 2))}))
    change(entries)
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + rest


def retold(text: str):
    return lambda entries: entries["__metadata__"].update(state=text)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 8 + b"{}",
        written({"a": torch.ones(3)})[:-1],
        written({"a": torch.ones(3)}) + b"\0",
        changed(lambda entries: entries.pop("__metadata__")),
        changed(lambda entries: entries.pop("1")),
        changed(lambda entries: entries["0"].update(shape=[4])),
        changed(lambda entries: entries["0"].update(shape=[-3])),
        changed(lambda entries: entries["0"].update(shape=[10**15], data_offsets=[0, 4 * 10**15])),
        changed(lambda entries: entries["0"].update(dtype="PICKLE")),
        changed(lambda entries: entries["1"].update(data_offsets=[0, 16])),
        changed(retold('{"$run": "rm"}')),
        changed(retold('{"$tensor": "7"}')),
        changed(retold('{"$tensor": "0", "dtype": "load", "shape": [3]}')),
        changed(retold('{"$tensor": "0", "dtype": "quint8", "shape": [12]}')),
        changed(retold('{"$dtype": "save"}')),
        changed(retold('{"$sparse": [[[5]], [1.0], [2], false]}')),
        changed(retold("[" * 100_000)),
    ],
    ids=range(19),
)
def test_another_content_is_refused(content: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, RuntimeError, RecursionError, AttributeError)):
        read(content)
