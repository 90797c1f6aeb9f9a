"""The sum of sparse gradients, with a reduction that adds what all ranks gave."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from autobatch.distributed.sparse_sum import as_sparse, sum_sparse


def test_a_gradient_becomes_sparse_by_its_rows() -> None:
    parameter = torch.zeros(4, 2)
    assert as_sparse(None, parameter)._nnz() == 0
    dense = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [2.0, 3.0]])
    found = as_sparse(dense, parameter)
    assert (found.sparse_dim(), found._nnz()) == (1, 2)
    assert torch.equal(found.to_dense(), dense)
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2), (4, 2), check_invariants=False)
    assert as_sparse(twice, parameter)._nnz() == 1


def test_every_rank_gets_the_entries_of_all() -> None:
    parameter = torch.zeros(5, 2)
    dense = [torch.randn(5, 2) * (torch.arange(5) % (rank + 2) == 0)[:, None] for rank in range(3)]
    dense[1].zero_()
    own = [as_sparse(one, parameter) for one in dense]
    counts = [one._nnz() for one in own]
    barrier, given, found = threading.Barrier(3), [torch.empty(0)] * 3, [torch.empty(0)] * 3

    def run(rank: int) -> None:
        def reduce(tensor: Tensor) -> None:
            given[rank] = tensor.clone()
            barrier.wait(20)
            tensor.copy_(torch.stack(given).sum(0))
            barrier.wait(20)

        found[rank] = sum_sparse(own[rank], counts, rank, reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        assert one._nnz() == sum(counts)
        assert torch.equal(one.to_dense(), sum(dense))
