"""LightningModules with the networks of Lightning's ten examples, and data made up for each.

They are built as the examples are, and know nothing of a pipeline: the parts have the same names,
the same layers of the same sizes, and the steps call them in the same way. ResNets have their real
depths and widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

ROWS = 4


class Example(L.LightningModule):
    """A LightningModule that is trained on made-up batches, with ``loss(*batch)`` as its loss."""

    loss: Callable[..., Tensor]
    data: Callable[[], Sequence[Tensor]]  # the tensors of two batches

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*self.data()), batch_size=ROWS)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Boring(Example):
    """The model of bug reports: a single layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def loss(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()

    def data(self) -> Sequence[Tensor]:
        return [torch.randn(2 * ROWS, 32)]


class AutoEncoder(Example):
    """An encoder and a decoder of nearly the same size."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 784))

    def loss(self, x: Tensor) -> Tensor:
        x = x.view(x.size(0), -1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def data(self) -> Sequence[Tensor]:
        return [torch.rand(2 * ROWS, 28, 28)]


class Backbone(nn.Module):
    """Two layers, called in a forward of their own."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.l1 = nn.Linear(784, hidden)
        self.l2 = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.l1(x.view(x.size(0), -1)))
        return torch.relu(self.l2(x))


class ImageClassifier(Example):
    """A lone child that is neither an nn.Sequential nor has one."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.backbone(x), y)

    def data(self) -> Sequence[Tensor]:
        return [torch.rand(2 * ROWS, 28, 28), torch.arange(2 * ROWS) % 10]


class LanguageModel(Example):
    """Lightning's own transformer, which keeps its mask from one call to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(dropout=0.0)

    def loss(self, tokens: Tensor, target: Tensor) -> Tensor:
        return F.nll_loss(self.model(tokens, target), target.view(-1))

    def data(self) -> Sequence[Tensor]:
        tokens = torch.randint(500, (2 * ROWS, 13))
        return [tokens[:, :-1], tokens[:, 1:]]


class Bottleneck(nn.Module):
    """Convolutions around which the input is added: two of 3 by 3, or three with one of 3 by 3."""

    def __init__(self, before: int, width: int, expansion: int, stride: int) -> None:
        super().__init__()
        after = width * expansion
        sizes = [(before, width, 3), (width, after, 3)]
        if expansion > 1:
            sizes = [(before, width, 1), (width, width, 3), (width, after, 1)]
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, stride if k == 3 and i == sizes[-2][0] else 1, k // 2, bias=False)
            for i, o, k in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in sizes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x))
            if k < len(self.convs) - 1:
                x = self.relu(x)
        return self.relu(x + identity)


class ResNet(nn.Module):
    """Residual networks of 18 and 50 layers, as torchvision builds them."""

    def __init__(self, depths: Sequence[int], expansion: int, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = 64
        for k, depth in enumerate(depths):
            blocks = []
            for j in range(depth):
                stride = 2 if k > 0 and j == 0 else 1
                blocks.append(Bottleneck(before, 64 * 2**k, expansion, stride))
                before = 64 * 2**k * expansion
            self.add_module(f"layer{k + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in ("layer1", "layer2", "layer3", "layer4"):
            x = getattr(self, name)(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ImageNet(Example):
    """A ResNet-18, of whose work its heaviest nn.Sequential has a quarter."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ResNet([2, 2, 2, 2], expansion=1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def data(self) -> Sequence[Tensor]:
        return [torch.rand(2 * ROWS, 3, 64, 64), torch.arange(2 * ROWS)]


class TransferLearning(Example):
    """The children of a ResNet-50 in an nn.Sequential, and a small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_extractor = nn.Sequential(*list(ResNet([3, 4, 6, 3], 4).children())[:-1])
        self.fc = nn.Sequential(
            nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 32), nn.Linear(32, 1)
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.feature_extractor(x).squeeze(-1).squeeze(-1)
        return F.binary_cross_entropy_with_logits(self.fc(features)[:, 0], y)

    def data(self) -> Sequence[Tensor]:
        return [torch.rand(2 * ROWS, 3, 64, 64), torch.arange(2 * ROWS) % 2.0]


class DoubleConv(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Up(nn.Module):
    """Doubles a picture, pads it to the size of another one, and joins both."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(before, before // 2, 2, 2)
        self.conv = DoubleConv(before, after)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        x = self.upsample(x)
        high, wide = skipped.shape[2] - x.shape[2], skipped.shape[3] - x.shape[3]
        x = F.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
        return self.conv(torch.cat([skipped, x], dim=1))


class UNet(nn.Module):
    """The layers down and up in one nn.ModuleList, called by slices of it."""

    def __init__(self, depth: int = 3, width: int = 64, classes: int = 19) -> None:
        super().__init__()
        self.depth = depth
        down = [
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(width << k, width << k + 1))
            for k in range(depth - 1)
        ]
        up = [Up(width << k + 1, width << k) for k in reversed(range(depth - 1))]
        last = nn.Conv2d(width, classes, 1)
        self.layers = nn.ModuleList([DoubleConv(3, width), *down, *up, last])

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.layers[0](x)]
        for layer in self.layers[1 : self.depth]:
            outputs.append(layer(outputs[-1]))
        for k, layer in enumerate(self.layers[self.depth : -1]):
            outputs[-1] = layer(outputs[-1], outputs[-2 - k])
        return self.layers[-1](outputs[-1])


class Segmentation(Example):
    """A U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def data(self) -> Sequence[Tensor]:
        return [torch.rand(2 * ROWS, 3, 22, 22), torch.randint(19, (2 * ROWS, 22, 22))]


class Network(nn.Module):
    """Layers in an nn.Sequential called ``model``, between two changes of shape."""

    def __init__(self, layers: Sequence[nn.Module], shape: Sequence[int]) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.view(x.size(0), -1)).view(x.size(0), *self.shape)


def _block(before: int, after: int) -> list[nn.Module]:
    return [nn.Linear(before, after), nn.BatchNorm1d(after, 0.8), nn.LeakyReLU(0.2, inplace=True)]


class GAN(Example):
    """Two networks and two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        first = [nn.Linear(100, 128), nn.LeakyReLU(0.2, inplace=True)]
        blocks = [*_block(128, 256), *_block(256, 512), *_block(512, 1024)]
        self.generator = Network([*first, *blocks, nn.Linear(1024, 784), nn.Tanh()], [1, 28, 28])
        self.discriminator = Network(
            [
                nn.Linear(784, 512),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Linear(512, 256),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Linear(256, 1),
            ],
            [1],
        )
        self.example_input_array = torch.zeros(2, 100)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        images, z = batch
        valid, fake = images.new_ones(len(images), 1), images.new_zeros(len(images), 1)
        score = F.binary_cross_entropy_with_logits
        generates, discriminates = self.optimizers()  # type: ignore[attr-defined]
        self.toggle_optimizer(generates)
        loss = score(self.discriminator(self(z)), valid)
        generates.zero_grad()
        self.manual_backward(loss)
        generates.step()
        self.untoggle_optimizer(generates)
        self.toggle_optimizer(discriminates)
        told = score(self.discriminator(images), valid)
        told = (told + score(self.discriminator(self(z).detach()), fake)) / 2
        discriminates.zero_grad()
        self.manual_backward(told)
        discriminates.step()
        self.untoggle_optimizer(discriminates)
        self.log_dict({"train_loss": loss, "d_loss": told})

    def loss(self, images: Tensor, z: Tensor) -> Tensor:
        return (self.discriminator(images) + self.discriminator(self(z))).mean()

    def data(self) -> Sequence[Tensor]:
        return [torch.rand(2 * ROWS, 1, 28, 28), torch.randn(2 * ROWS, 100)]

    def configure_optimizers(self) -> Any:
        networks = (self.generator, self.discriminator)
        return [torch.optim.SGD(network.parameters(), lr=1e-3) for network in networks], []


def perceptron(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, outputs))


class Valued(nn.Module):
    """A network of values for actions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Experience(IterableDataset[Any]):
    """What an agent has seen, made while it is iterated."""

    def __init__(self, generate: Callable[[], Iterator[Any]]) -> None:
        self._generate = generate

    def __iter__(self) -> Iterator[Any]:
        return self._generate()


class DeepQ(Example):
    """A network that is trained, and a copy whose values are its targets; acts with one row."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target_net = Valued(), Valued()

    def loss(self, states: Tensor, actions: Tensor, rewards: Tensor, after: Tensor) -> Tensor:
        values = self.net(states).gather(1, actions.long()[:, None])[:, 0]
        with torch.no_grad():
            best = self.target_net(after).max(1)[0].detach()
        return F.mse_loss(values, rewards + 0.9 * best)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net(batch[0][:1]).max(1)
        loss: Tensor = super().training_step(batch, batch_idx)
        self.target_net.load_state_dict(self.net.state_dict())
        return loss

    def data(self) -> Sequence[Tensor]:
        n = 2 * ROWS
        return [torch.randn(n, 4), torch.arange(n) % 2, torch.rand(n), torch.randn(n, 4)]


class Actor(nn.Module):
    """A policy: a network that gives a distribution, and an action of it."""

    def __init__(self) -> None:
        super().__init__()
        self.actor_net = perceptron(2)

    def forward(self, states: Tensor) -> tuple[Categorical, Tensor]:
        policy = Categorical(logits=self.actor_net(states))
        return policy, policy.sample()


class PPO(Example):
    """An actor and a critic, with what they did as the data; two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = perceptron(1)
        self.actor = Actor()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        states, actions, returns = batch
        acts, criticizes = self.optimizers()  # type: ignore[attr-defined]
        policy, _ = self.actor(states)
        loss = -(policy.log_prob(actions) * returns).mean()
        self.manual_backward(loss)
        acts.step()
        acts.zero_grad()
        error = F.mse_loss(self.critic(states)[:, 0], returns)
        self.manual_backward(error)
        criticizes.step()
        criticizes.zero_grad()
        self.log("train_loss", error)

    def loss(self, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        policy, _ = self.actor(states)
        return F.mse_loss(self.critic(states)[:, 0], returns) - policy.log_prob(actions).mean()

    def data(self) -> Sequence[Tensor]:
        return [torch.randn(2 * ROWS, 4), torch.arange(2 * ROWS) % 2, torch.rand(2 * ROWS)]

    def _generated(self) -> Iterator[Any]:
        for state, action, value in zip(*self.data(), strict=True):
            with torch.no_grad():
                self.actor(state[None].to(self.critic[0].weight))
            yield state, action, value

    def train_dataloader(self) -> Any:
        return DataLoader(Experience(self._generated), batch_size=ROWS)

    def configure_optimizers(self) -> Any:
        networks = (self.actor, self.critic)
        return [torch.optim.SGD(network.parameters(), lr=1e-3) for network in networks], []


EXAMPLES: tuple[type[Example], ...] = (
    AutoEncoder,
    Boring,
    DeepQ,
    GAN,
    ImageClassifier,
    ImageNet,
    LanguageModel,
    PPO,
    Segmentation,
    TransferLearning,
)
