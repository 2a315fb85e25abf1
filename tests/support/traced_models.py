"""Models whose forward is more than one layer after another, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DoubleConv(nn.Module):
    """Two convolutions, each with a norm and in-place ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(2, outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Down and up again, with additions across."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.inc = DoubleConv(3, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.outc = nn.Conv2d(width, 2, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3) + x2
        x = self.up2(x) + x1
        return self.outc(x)


class NumberedLayers(nn.Module):
    """An embedding, many layers in attributes, a head."""

    def __init__(self, depth: int = 8, width: int = 4) -> None:
        super().__init__()
        self.depth = depth
        self.embedding = nn.Linear(3, width)
        for k in range(depth):
            setattr(self, f"layer{k}", nn.Linear(width, width))
        self.head = nn.Linear(width, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for k in range(self.depth):
            x = torch.tanh(getattr(self, f"layer{k}")(x))
        return self.head(x)


class Encoder(nn.Module):
    """PyTorch's encoder layers between an embedding with positions and a head."""

    def __init__(self, depth: int = 4, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.positions = nn.Parameter(torch.linspace(-1, 1, 9 * width).view(1, 9, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 8, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 11)
        self.double()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions[:, : tokens.size(1)]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        return self.head(x)


class Residual(nn.Module):
    """Two convolutions around which the input is added; one ReLU is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Residual blocks; one ReLU and one dropout are used all over the model."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 1)
        self.relu = nn.ReLU()
        self.drop = nn.Dropout(0.0)
        self.layer1 = nn.Sequential(Residual(width), Residual(width))
        self.layer2 = nn.Sequential(Residual(width), Residual(width))
        self.fc = nn.Linear(width, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(x))
        x = self.drop(self.relu(self.layer1(x)))
        x = self.drop(self.relu(self.layer2(x)))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return self.fc(x)


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, blocks of attention."""

    scale: Tensor

    def __init__(self, depth: int = 3, width: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.cls_token = nn.Parameter(torch.linspace(-1, 1, width).view(1, 1, width))
        self.positions = nn.Parameter(torch.linspace(-1, 1, 5 * width).view(1, 5, width))
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.Sequential(*(AttentionBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        torch._assert(h == w, "images must be square")
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(n, -1, -1), x], dim=1)
        x = self.blocks(x * self.scale + self.positions)
        return self.head(x[:, 0] * self.scale)


class AttentionBlock(nn.Module):
    """Attention with heads, and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))
        self.gamma = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(rows, length, 3, 2, width // 2)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.gamma * y.transpose(1, 2).reshape(rows, length, width)
        return x + self.mlp(self.norm2(x))


class Inception(nn.Module):
    """Branches that are joined, and in training a second head."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.branch1 = nn.Conv2d(width, width, 1)
        self.branch2 = nn.Sequential(nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1))
        self.aux = nn.Linear(2 * width, 2)
        self.mixed = nn.Conv2d(2 * width, width, 1)
        self.fc = nn.Linear(width, 2)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        x = self.stem(x)
        x = torch.cat([self.branch1(x), F.relu(self.branch2(x))], 1)
        aux = self.aux(x.mean((2, 3))) if self.training else None
        x = self.mixed(x)
        return {"logits": self.fc(x.mean((2, 3))), "aux": aux}


class Modes(nn.Module):
    """A layer without gradients, another without autocast, and an assertion."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2, "rows"
        with torch.no_grad():
            y = self.frozen(x) * 2
        return self.last(self.first(x) + y)
