"""Contents of wrong files: config tables, hardware profiles, results of runs, and workloads."""

from __future__ import annotations

DEEP = 20_000
PLANTED = "\x1b]0;title\x07\x9b31m\u202e\r\n<script>alert(1)</script>"
"""Text that changes the title and colour of a terminal, turns a line around, ends it, and runs in a page."""
TABLES = (
    "=", "[", "a = ", "steps = ", "target-batch = 8\ntarget_batch = 8", "target_batch = 8\nsteps = '3x'",
    "tagret_batch = 8", '"\\u001b[31m" = 1', "target_batch = true", "target_batch = 8.5",
    "target_batch = nan", "target_batch = inf", "target_batch = -8", "target_batch = [8]",
    "target_batch = {a = 1}", "target_batch = 2026-11-21", "target_batch = 8\ndevice = 3",
    "target_batch = 8\ndevice = 'tpu'", "target_batch = 8\nworkload = 3", "target_batch = 8\nworkload = ''",
    "target_batch = 8\nworkload = ['a:b']", "target_batch = 8\nworkload = 'nul\\u0000:w'",
    "target_batch = 8\nout = 'nul\\u0000'".replace("'", '"'), "target_batch = 8\nsteps = 1\nepochs = 1",
    "target_batch = 8\nmemory_budget = 0", "target_batch = 8\nmemory_budget = 1.5",
    "target_batch = 8\nmemory_budget = '1e5'", "target_batch = 8\nprecision = 'fp8'",
    "target_batch = 8\nprecision = ['bf16']", "target_batch = 8\njson = 'x'",
    "target_batch = 8\nworkers = 1000000000", "target_batch = 8\nknobs = 'nothing'",
    "target_batch = 8\nema = 1.0", "target_batch = 8\nmax_grad_norm = nan", "target_batch = 8\ntimeout = 0",
    "target_batch = 8\nseed = -1", "target_batch = 99999999999999999999", "target_batch = " + "9" * 5000,
    "target_batch = 0x" + "f" * 9000, "a = " + "[" * DEEP, "a = " + "{a = " * DEEP,
    ".".join(["steps"] * 5000) + " = 1", "[tool]\nx = 1\n[[tool]]", "target_batch = '" + "x" * 100_000 + "'",
    "'" + "x" * 100_000 + "' = 1", "target_batch = 8\ntarget_batch = 8",
)  # fmt: skip
FIGURE = 'value = 1073741824\nunit = "B"\nsource = "s"\ndate = "2026-11-21"\nmeasured = false\n'
HEAD = 'schema = 1\nname = "p"\ntitle = "P"\nvendor = "V"\ncompute_capability = "8.0"\n'
TOTAL = f"{HEAD}[total]\n{FIGURE}"
_PROFILES = (
    "", "x", "[", "schema = 2", "schema = 'x'", "schema = " + "9" * 5000, HEAD, HEAD + "total = 5",
    HEAD.replace('"p"', '"P p"') + "[total]\n" + FIGURE, TOTAL.replace('"B"', '"GB"'),
    TOTAL.replace("1073741824", "0"), TOTAL.replace("1073741824", "-5"),
    TOTAL.replace("1073741824", "9" * 30), TOTAL.replace("1073741824", "inf"),
    TOTAL.replace("1073741824", "0x" + "f" * 9000), HEAD + "[total]\n" + FIGURE + "x = 1",
    TOTAL.replace('"B"', '"count"'), TOTAL.replace("false", "0"),
    HEAD.replace('"8.0"', "8.0") + "[total]\n" + FIGURE, HEAD.replace('"8.0"', '"8"') + "[total]\n" + FIGURE,
    HEAD.replace("title", "titel") + "[total]\n" + FIGURE, HEAD + '"\\u001b" = 1\n[total]\n' + FIGURE,
    HEAD + "device_names = 'x'\n[total]\n" + FIGURE, HEAD + "device_names = " + "[" * DEEP,
    ".".join(["schema"] * 5000) + " = 1", HEAD.replace("V", "") + "[total]\n" + FIGURE, "\0",
)  # fmt: skip
PROFILES = (*(text.encode() for text in _PROFILES), b"\xff\xfe", bytes(range(256)))
_RUNS = (
    "", "{", "[]", "null", "3", '"x"', "{}", "NaN", "1e999", "[" * DEEP, '{"device": ' * DEEP, "9" * 5000,
    '{"device": 3}', '{"device": {}}', '{"device": {"kind": 1}}', '{"device": null, "notes": 5}',
    '{"device": {"kind": "\\u001b[31m"}}', '{"notes": {}, "metrics": 3, "device": {"total_bytes": 1e308}}',
    '{"device": "' + "x" * 100_000 + '"}', "\0", "[NaN]", '{"device": {"kind": "cpu", "total_bytes": "x"}}',
)  # fmt: skip
RUNS = (*(text.encode() for text in _RUNS), b"\xff\xfe\x00", b"\x80" * 100)
BASE = """
import torch
from torch.utils.data import TensorDataset
from autobatch import Workload

def loss(model, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)

def small(**fields):
    return Workload(**{
        "name": "small",
        "model": lambda: torch.nn.Linear(4, 1),
        "train_data": TensorDataset(torch.ones(32, 4), torch.ones(32, 1)),
        "loss": loss,
        "optimizer": lambda params, learning_rate: torch.optim.SGD(params, lr=learning_rate),
        "learning_rate": 0.01,
        **fields,
    })

def fails(*_):
    raise RuntimeError("\\x1b[31m\\x9b first\\nsecond")

def long(*_):
    raise RuntimeError("x" * 100_000)

class Silent(Exception):
    def __str__(self):
        raise ValueError("no text")

def silent(*_):
    raise Silent
"""
_FIELDS = (
    "model=fails", "model=long", "model=silent", "model=lambda: 3", "model=lambda: None", "model=3",
    "train_data=3", "train_data=[]", "train_data=None", "train_data=[1, 'a']", "loss=fails", "loss=long",
    "loss=silent", "loss=lambda model, batch: 3.0", "loss=lambda model, batch: model(batch[0])",
    "loss=lambda model, batch: loss(model, batch) * float('nan')", "loss=3", "loss=lambda: 0",
    "optimizer=fails", "optimizer=3", "optimizer=lambda params, lr: None", "optimizer=lambda params, lr: 'x'",
    "optimizer=lambda params, lr: torch.optim.SGD([torch.zeros(1)], lr)", "learning_rate='x'",
    "learning_rate=-1", "learning_rate=0", "learning_rate=float('nan')", "learning_rate=None",
    "collate=fails", "collate=3", "collate=silent", "size_of=fails", "size_of=lambda sample: 'x'", "name=3",
    "name=''", "name='nul\\0'", "name='../../x'", "name='x' * 5000", "schedule=3", "metrics=3",
    "base_batch=0", "base_batch='x'", "nothing=1", "train_data=[torch.zeros(n) for n in range(1, 9)]",
    "loss=lambda model, batch: (_ for _ in ()).throw(SystemExit('\\x1b' * 9))",
    "loss=lambda model, batch: loss(model, batch).detach()", "loss=lambda model, batch: torch.ones(3).sum()",
    "model=lambda: torch.nn.Linear(5, 1)", "model=lambda: torch.nn.Identity()", "model=torch.nn.Linear",
)  # fmt: skip
WORKLOADS = (
    "def w(:\n", "\0", "raise RuntimeError('\\x1b[31m' * 9)", "raise RuntimeError('x' * 100_000)",
    "import nothing_like_it", "w = 3", "def w():\n    return 3", "def w(argument):\n    return 3",
    "def w():\n    w()", "import sys\nsys.exit('\\x1b')", "def w():\n    raise SystemExit(0)",
    "def v():\n    pass", "w = None", "class w:\n    pass", "def w():\n    1 / 0",
    "def w():\n    raise RecursionError", "def w():\n    raise MemoryError('\\x1b')",
    "def w():\n    raise OSError(28, 'full')",
    *(f"{BASE}\ndef w():\n    return small({one})\n" for one in _FIELDS),
)  # fmt: skip
