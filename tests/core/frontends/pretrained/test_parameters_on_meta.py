from threading import Thread

import torch
from torch import nn

from lightning_gpipe.core.frontends.pretrained.parameters_on_meta import parameters_on_meta


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)


def test_buffers_have_their_values() -> None:
    with parameters_on_meta():
        module = nn.Sequential(Rotary(), nn.BatchNorm1d(2))

    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.get_buffer("0.frequencies").tolist() == [0, 1, 2]
    assert module.get_buffer("1.running_var").tolist() == [1, 1]


def test_frozen_parameters_are_frozen() -> None:
    with parameters_on_meta():
        module = nn.Module()
        module.weight = nn.Parameter(torch.ones(2), requires_grad=False)

    assert not module.weight.requires_grad


def test_parameters_tied_before_and_after_a_module_has_them() -> None:
    with parameters_on_meta():
        one, two, three = (nn.Linear(2, 2, bias=False) for _ in range(3))
        one.weight = two.weight = nn.Parameter(torch.ones(2, 2))
        three.weight = two.weight

    assert one.weight is two.weight
    assert three.weight is two.weight


def test_parameters_of_other_classes_stay() -> None:
    class Packed(nn.Parameter):
        pass

    with parameters_on_meta():
        module = nn.Module()
        module.weight = Packed(torch.ones(2))

    assert type(module.weight) is Packed
    assert not module.weight.is_meta


def test_afterwards_and_on_other_threads() -> None:
    built: list[nn.Module] = []
    with parameters_on_meta():
        thread = Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join(60)
    built.append(nn.Linear(2, 2))

    assert [module.weight.is_meta for module in built] == [False, False]
