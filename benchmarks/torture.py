"""Torture of the product from outside.

python -m benchmarks.torture [--number 600] [--seed 1]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.wrong_inputs import ask, counts, wrong_inputs


def main() -> int:
    """Ask every wrong input, print the counts and the faults, and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    answers, start = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        for index, asked in enumerate(wrong_inputs(given.number, given.seed)):
            folder = Path(root, str(index))
            folder.mkdir()
            answers.append(ask(asked, folder))
    for answer in answers:
        if answer.faults:
            asked = answer.asked
            shown = (asked.words, asked.environ, {name: text[-300:] for name, text in asked.files.items()})
            print(f"{', '.join(answer.faults)}: {str(shown)[:900]}\n    {answer.err[:900]!r}")
    for kind, found in counts(answers).items():
        print(f"{kind:<10}", ", ".join(f"{name}: {number}" for name, number in sorted(found.items())))
    faulty = sum(bool(answer.faults) for answer in answers)
    print(f"{len(answers)} wrong inputs, {faulty} faulty, {time.perf_counter() - start:.0f} s")
    return int(faulty > 0)


if __name__ == "__main__":
    raise SystemExit(main())
