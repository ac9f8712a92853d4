"""The interface of a worker to the group of processes that train one job together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from ngsgd.training.parameter_vector import Vector


class Ranks:
    """A group of one process; larger groups override every method (`ngsgd.cluster.groups`)."""

    rank = 0
    size = 1
    # backend of the sums, if results depend on it
    summed_by = ""

    def start_vector(self, read: Callable[[], Vector], size: int) -> Vector:
        """Return the parameters before the first minibatch; only rank 0 calls `read`."""
        return read()

    def sum_gradients(self, model: nn.Module, num_examples: int) -> int:
        """Sum every gradient over the ranks in place; return the sum of their examples."""
        return num_examples

    def sum_(self, values: Sequence[Tensor]) -> None:
        """Replace 0-d tensors by their sums over the ranks."""

    def any(self, flag: bool) -> bool:
        """Return True if the flag is True on any rank."""
        return flag

    def of_rank(self, first: int, stop: int) -> Iterator[int]:
        """Indices of the minibatches of this rank."""
        return iter(range(first + self.rank, stop, self.size))


ALONE = Ranks()
