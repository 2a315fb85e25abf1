"""The same layers with another package's skip connections.

torchgpipe and fairscale support their own skippable layers only. Ours have the same syntax, so a
layer is translated by yielding their stash and pop for ours, and runs nothing that a layer written
for them would not run. The parameters stay the same objects, in the same order.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from lightning_gpipe import skip as ours
from lightning_gpipe.core.skip.declare import declaration_of, full_name


def with_skips_of(skips: ModuleType, module: nn.Sequential) -> nn.Sequential:
    """The layers of ``module``, the skippable ones as those of ``skips``.

    Args:
        skips: Such as ``torchgpipe.skip``.
        module: Its children are kept, within translated ones where they are skippable.
    """
    namespaces: dict[object, object] = {}
    layers: list[nn.Module] = []
    for layer in module:
        declared = declaration_of(layer)
        if declared is None:
            layers.append(layer)
            continue
        kind = skips.skippable(stash=declared.stash, pop=declared.pop)(_translated(skips))
        translated = kind(layer)
        for name in (*declared.stash, *declared.pop):
            namespace = namespaces.setdefault(full_name(layer, name).namespace, skips.Namespace())
            translated.isolate(namespace, only=[name])
        layers.append(translated)
    return nn.Sequential(*layers)


def _translated(skips: ModuleType) -> type[nn.Module]:
    class Translated(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            # The forward as it is written, without what our decorator does around it.
            run = type(self.layer).forward.__wrapped__(self.layer, x)  # type: ignore[attr-defined]  # by functools.wraps
            answer = None
            while True:
                try:
                    wish = run.send(answer)
                except StopIteration as end:
                    return end.value
                if isinstance(wish, ours.stash):
                    answer = yield skips.stash(wish.name, wish.tensor)
                else:
                    answer = yield skips.pop(wish.name)

    return Translated
