"""Objects that blocks fill: None with gradients, one micro-batch without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.interpreter import Interpreter
from tests.support.loops import WIDTH, Around, looped, states
from tests.support.models import assert_same_step


class Cache:
    """What blocks have seen, by their indices."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def update(self, k: int, x: Tensor) -> Tensor:
        self.seen[k] = torch.cat([self.seen[k], x], 1) if k in self.seen else x
        return self.seen[k]


class Remembering(nn.Linear):
    """Adds the mean of what it has seen."""

    def __init__(self, k: int = 0) -> None:
        super().__init__(WIDTH, WIDTH)
        self.k = k

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        y: Tensor = super().forward(x)
        seen = y if cache is None else cache.update(self.k, y)
        return x + seen.mean(1, keepdim=True)


class Model(Around):
    def __init__(self) -> None:
        super().__init__(block=Remembering)
        for k, block in enumerate(self.blocks):
            assert isinstance(block, Remembering)
            block.k = k


def test_cache_without_gradients_is_filled_by_one_micro_batch():
    plain = Model()
    model = copy.deepcopy(plain)
    caches, run = [Cache(), Cache()], Interpreter()
    batches = [states(length=length) for length in (5, 1, 1)]
    with torch.no_grad():
        wanted = [plain(batch, cache=caches[1]) for batch in batches]
        with looped(model, run=run), pytest.warns(UserWarning, match="one micro-batch"):
            found = [model(batch, cache=caches[0]) for batch in batches]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*[cache.seen for cache in caches])
    assert run.used == [1, 1, 1]


def test_cache_with_gradients_is_left_out_and_that_is_said_once(
    recwarn: pytest.WarningsRecorder,
):
    plain = Model()
    model = copy.deepcopy(plain)
    cache, run = Cache(), Interpreter()
    with looped(model, run=run):
        for _ in range(2):
            torch.testing.assert_close(model(states(), cache=cache), plain(states()))
        assert_same_step(model, plain, states())
    assert not cache.seen
    assert run.used == [3, 3, 3]
    (warning,) = recwarn
    assert str(warning.message).startswith("cache of blocks.0 (")
    assert "is None while gradients are recorded" in str(warning.message)


def test_cache_that_only_blocks_of_another_structure_fill():
    """The kind of a block was its class, so that the first block spoke for all.

    In a RecurrentGemma only every third block fills the cache: with one of its micro-batches in
    it, the next failed, or silently attended to it.
    """

    class Mixing(nn.Module):
        def __init__(self, mixer: nn.Linear) -> None:
            super().__init__()
            self.mixer = mixer

        def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
            remembers = isinstance(self.mixer, Remembering)
            y: Tensor = self.mixer(x, cache) if remembers else self.mixer(x)
            return y

    plain = Model()
    for k in range(4):
        mixer = Remembering(k) if k % 2 else nn.Linear(WIDTH, WIDTH)
        plain.blocks[k] = Mixing(mixer).double()
    model = copy.deepcopy(plain)
    with looped(model), pytest.warns(UserWarning, match="cache of blocks.1.* is None"):
        found = model(states(), cache=Cache())
    torch.testing.assert_close(found, plain(states(), cache=Cache()))


def test_full_cache_with_gradients():
    model, cache = Model(), Cache()
    with torch.no_grad():
        model(states(), cache=cache)
    with looped(model), pytest.raises(RuntimeError, match="must be empty .* got cache of blocks.0"):
        model(states(), cache=cache)


def test_object_that_is_not_filled_is_given_to_every_block():
    class Settings:
        factor = 2.0

        def __init__(self) -> None:
            self.offset = torch.ones(1, dtype=torch.float64)

    class Block(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: Tensor, settings: Any = None) -> Tensor:
            return settings.factor * super().forward(x) + settings.offset

    plain = Around(block=Block)
    model = copy.deepcopy(plain)
    run = Interpreter()
    with looped(model, run=run):
        for _ in range(2):
            found, wanted = (each(states(), settings=Settings()) for each in (model, plain))
            torch.testing.assert_close(found, wanted)
    assert run.used == [3, 3]


def test_cache_that_blocks_return():
    class Returning(Remembering):
        def forward(self, x: Tensor, cache: Cache | None = None) -> Any:
            return super().forward(x, cache), cache

    class Passing(Model):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            cache = kwargs["cache"]
            for block in self.blocks:
                x, cache = block(x, cache)
            return x, cache

    plain = Passing()
    for k in range(4):
        plain.blocks[k] = Returning(k).double()
    model = copy.deepcopy(plain)
    caches = [Cache(), Cache()]
    with looped(model), torch.no_grad(), pytest.warns(UserWarning, match="one micro-batch"):
        found, cache = model(states(), cache=caches[0])
    with torch.no_grad():
        wanted, _ = plain(states(), cache=caches[1])
    torch.testing.assert_close(found, wanted)
    assert cache is caches[0]
    torch.testing.assert_close(*[cache.seen for cache in caches])


class Counting(Cache):
    """Counts in a tensor, as the caches of transformers with a sliding window do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.tensor(0)


@pytest.mark.parametrize("shape", [(7, 5, WIDTH), (14, 1)])
def test_cache_that_counts_in_a_tensor(shape: tuple[int, ...]):
    """Its counter was taken for contents; and a mask of doubtful rows was not given beside it."""

    class Masked(Remembering):
        def forward(
            self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None
        ) -> Tensor:
            assert mask is not None
            return super().forward(x, cache) * mask.unflatten(0, (len(x), -1)).mean()

    class Passing(Around):
        def forward(self, x: Any, **kwargs: Any) -> Any:
            mask = torch.ones(shape, dtype=x.dtype)
            for block in self.blocks:
                x = block(x, Counting(), mask)
            return x

    plain = Passing(block=Masked)
    model = copy.deepcopy(plain)
    with looped(model), pytest.warns(UserWarning, match="is None while gradients are recorded"):
        found = model(states())
    torch.testing.assert_close(found, plain(states()))


def test_sliding_window_with_its_cache():
    transformers = pytest.importorskip("transformers", reason="needs pip install transformers")
    config = transformers.MistralConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=3,
    )
    plain = transformers.MistralForCausalLM(config).double()
    model = copy.deepcopy(plain)
    ids = torch.arange(35).reshape(7, 5) % 11
    with looped(model, "model.layers"), pytest.warns(UserWarning, match="past_key_values.*is None"):
        found = model(input_ids=ids).logits
    torch.testing.assert_close(found, plain(input_ids=ids).logits)
