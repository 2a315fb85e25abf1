"""Claim: a published model in four stages computes what its plain layers compute.

U-Net (5, 64) and AmoebaNet-D (18, 208) at their published size, on small images. In float64, since
in float32 the order of sums alone moves U-Net's output by a hundredth; without dropout. One forward
and backward each way; output, loss and all gradients must agree to 1e-9.

    python -m benchmarks.published_models unet        # half a minute each way, 7 GiB
    python -m benchmarks.published_models amoebanet   # the same, 3 GiB
"""

import argparse
import time

import torch
from torch import Tensor, nn

from benchmarks.models import amoebanetd, unet
from lightning_gpipe import GPipe, balance_by_parameters

MODELS = {"unet": lambda: unet(5, 64), "amoebanet": lambda: amoebanetd(18, 208)}


def step(module: nn.Module, x: Tensor) -> tuple[list[Tensor], float]:
    """Output, loss and gradients, and the seconds that they took."""
    start = time.perf_counter()
    y = module(x)
    loss = y.square().mean()
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return [y.detach(), loss.detach(), *gradients], time.perf_counter() - start


def main() -> None:
    """Run one model both ways, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--size", type=int, default=64, help="of the images")
    parser.add_argument("--stages", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(1)
    module = MODELS[options.model]().double().eval()
    x = torch.randn(2, 3, options.size, options.size, dtype=torch.float64)

    expected, plain = step(module, x)
    balance = balance_by_parameters(module, options.stages)
    pipeline = GPipe(module, balance, devices=["cpu"] * options.stages, chunks=2)
    found, pipelined = step(pipeline, x)
    pipeline.close()

    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(f"{options.model}: {len(module)} layers, {parameters:,} parameters, balance {balance}")
    print(f"plain {plain:.1f} s, pipelined {pipelined:.1f} s; {len(found)} tensors agree")


if __name__ == "__main__":
    main()
