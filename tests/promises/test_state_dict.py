"""Plain checkpoints: the state dict is the plain module's and loads under any balance.

The checkpoints that Lightning saves are tested in tests/lightning/test_checkpoint.py.
"""

from torch import nn

from tests.support.models import assert_same, perceptron, rows
from tests.support.pipes import Pipe


def test_state_dict_of_another_balance(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: named parameters by partition, so only an equal balance could load them."""
    plain = perceptron(6)
    state = pipe(plain, balance=[2, 4]).state_dict()

    for other in (perceptron(6), pipe(perceptron(6), balance=[5, 1])):
        other.load_state_dict(state)
        assert_same(other.state_dict(), plain.state_dict())


def test_state_dict_with_batch_norms(pipe: Pipe) -> None:
    """torchgpipe 0.0.7: added the sums of its batch norms to the state dict."""
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    pipeline = pipe(plain)

    pipeline(rows(8))

    assert list(pipeline.state_dict()) == list(plain.state_dict())
