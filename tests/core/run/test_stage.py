import pytest
from torch import nn

from tests.support.stages import Pair, begin, stage

TRAIN = bytes([True])  # the flags of one module


def test_stage_names_its_layers_and_its_device() -> None:
    assert str(stage(nn.ReLU(), nn.ReLU())) == "stage 0 (layers 0..1, cpu)"


def test_parametrization_registered_later() -> None:
    linear = nn.Linear(2, 2)
    changed = stage(linear)
    nn.utils.parametrizations.weight_norm(linear)

    changed.refresh()
    run = begin(changed)

    assert set(run.shadows.parameters) == set(linear.parameters())


def test_layer_within_a_layer_that_is_replaced() -> None:
    outer = Pair(nn.Linear(2, 2), nn.Tanh())
    changed = stage(outer)
    known = changed.state.behavior(TRAIN, "inputs")
    outer[1] = nn.BatchNorm1d(2)

    changed.refresh()

    assert changed.modules == (outer, outer[0], outer[1])
    assert changed.state.behavior(TRAIN, "inputs") is not known
    assert begin(changed).statistics is not None


def test_nothing_is_forgotten_while_nothing_changes() -> None:
    same = stage(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    known = same.state.behavior(TRAIN, "inputs")
    modules = same.modules

    same.refresh()

    assert same.modules is modules
    assert same.state.behavior(TRAIN, "inputs") is known


def test_parameter_that_was_moved() -> None:
    moved = stage(nn.Linear(2, 2), nn.Linear(2, 2))
    moved.partition.layers[1].to("meta")

    with pytest.raises(RuntimeError, match="must stay on cpu: found 'weight' of Linear on meta"):
        moved.refresh()


def test_statistics_are_those_of_batch_norms() -> None:
    assert stage(nn.LayerNorm(3), nn.Tanh()).statistics() is None
    assert stage(nn.Tanh(), nn.Sequential(nn.BatchNorm1d(3))).statistics() is not None


def test_training_mode_is_put_back() -> None:
    layers = stage(nn.Dropout(), nn.Tanh())
    flags = layers.training_flags
    layers.partition.layers[0].eval()

    with layers.training_as(flags):
        assert layers.training_flags == bytes([True, True])

    assert layers.training_flags == bytes([False, True])
