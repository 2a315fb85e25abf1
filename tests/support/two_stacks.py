"""A model with two stacks of blocks, as an encoder-decoder has, in a LightningModule."""

from __future__ import annotations

from torch import Tensor, nn

from tests.support.lightning_modules import FEATURES, WIDTH, Classifier


class Block(nn.Module):
    """Adds to its input, with something for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, memory: Tensor | None = None) -> Tensor:
        y = self.linear(x).tanh()
        return x + (y if memory is None else y * memory)


class Stacks(nn.Module):
    """An encoder and a decoder, and what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = memory = self.enter(x)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory=memory)
        return x


class Translator(Classifier):
    """Two stacks and a head."""

    def __init__(self, optimizer: str = "momentum", scheduled: bool = False) -> None:
        super().__init__(optimizer, scheduled)
        self.layers = Stacks()  # type: ignore[assignment]  # no Sequential
        self.double()
