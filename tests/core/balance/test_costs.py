import torch
from torch import nn

from lightning_gpipe.core.balance.costs import parameter_costs


def test_costs_are_numbers_of_elements() -> None:
    layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5)]

    assert parameter_costs(layers) == [16, 0, 20, 10]  # the buffers of BatchNorm do not count


def test_nested_layers_count_all_they_hold() -> None:
    assert parameter_costs([nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))]) == [31]


def test_frozen_parameters_count() -> None:
    assert parameter_costs([nn.Linear(3, 4).requires_grad_(False)]) == [16]


def test_parameter_shared_within_a_layer_counts_once() -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight

    assert parameter_costs([nn.Sequential(one, two)]) == [15]


def test_parameter_shared_between_layers_counts_for_the_first() -> None:
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10)
    head.weight = embedding.weight

    assert parameter_costs([embedding, nn.Linear(4, 4), head]) == [40, 20, 10]


def test_meta_tensors_are_counted_without_memory() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(100_000, 100_000, bias=False) for _ in range(4)))

    assert parameter_costs(module) == [10**10] * 4
