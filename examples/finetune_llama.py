"""A Llama of Hugging Face's transformers, trained or fine-tuned as a pipeline.

`Llama` is a LightningModule around an unchanged `LlamaForCausalLM`. The pipeline runs the blocks
that its forward loops over; embedding, last norm and head are outside it, on the last device.

Nothing is downloaded. The text is that of `examples.char_lm`, a byte-pair tokenizer is trained on
it, and the model is built from a config. The run ends with the report of all examples, a sample,
and a folder written by `save_pretrained`. `--pretrained` loads such a folder, of this or another
Llama, and reads each tensor onto the device of its stage. `--lora` trains adapters of that rank,
and needs peft (`pip install peft`).

    python -m examples.finetune_llama               # 2 stages on 2 CPU cores, some minutes
    python -m examples.finetune_llama --pretrained runs/finetune_llama/version_0/llama --lora 8
    python -m examples.finetune_llama --accelerator gpu --devices 4 --size large
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, RandomSampler
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.char_lm import TEXT, split, unigram_loss
from examples.report import Measurements, options_parser, report, start, trainer_arguments
from lightning_gpipe import GPipeStrategy
from lightning_gpipe.core.frontends.pretrained import load_pretrained, parameters_on_meta


def trained_tokenizer(text: str, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer with `vocabulary` tokens."""
    bytes_and_pairs = ByteLevelBPETokenizer()
    bytes_and_pairs.train_from_iterator(
        text.splitlines(keepends=True), vocabulary, show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=bytes_and_pairs._tokenizer)


class Windows(Dataset[Tensor]):
    """Pieces of `context` tokens, one every `stride`."""

    def __init__(self, tokens: Tensor, context: int, stride: int) -> None:
        self.pieces = tokens.unfold(0, context, stride)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        return self.pieces[index]


class TopicsTokens(L.LightningDataModule):
    """The language reference, in windows of `context` tokens.

    Training windows may begin anywhere: an epoch draws `training_windows` of them, or with None
    each one once. The tokenizer is loaded from the folder `pretrained`, or trained on the text.
    """

    def __init__(
        self,
        context: int = 128,
        batch_size: int = 16,
        vocabulary: int = 2048,
        pretrained: str | None = None,
        training_windows: int | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.training_windows = training_windows
        self.vocabulary = vocabulary
        self.pretrained = pretrained
        self.training = self.validation = torch.empty(0, dtype=torch.int64)

    def setup(self, stage: str) -> None:
        if len(self.training):
            return
        texts = split(TEXT)
        if self.pretrained is None:
            self.tokenizer = trained_tokenizer(texts[0], self.vocabulary)
        else:
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(self.pretrained)
        self.training, self.validation = (
            torch.tensor(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        windows = Windows(self.training, self.context, stride=1)
        sampler = RandomSampler(windows, num_samples=self.training_windows)
        return DataLoader(windows, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Windows(self.validation, self.context, self.context), self.batch_size)


class Llama(L.LightningModule):
    """A Llama built from a config, or from the folder `pretrained`; with adapters if `lora` > 0."""

    def __init__(
        self,
        vocabulary: int = 2048,
        width: int = 192,
        blocks: int = 4,
        heads: int = 4,
        learning_rate: float = 3e-3,
        pretrained: str | None = None,
        lora: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            tie_word_embeddings=True,
        )
        if pretrained is not None:
            self.config = LlamaConfig.from_pretrained(pretrained)
        self.config.use_cache = False  # only needed for generation
        self.learning_rate = learning_rate
        self.pretrained = pretrained
        self.lora = lora
        self.llama: Any = None

    def configure_model(self) -> None:
        if self.llama is not None:
            return
        # In a pipeline, each weight is read onto the device of its stage, not into host memory.
        late = self.pretrained is not None and self.in_pipeline
        with parameters_on_meta() if late else nullcontext():
            self.llama = LlamaForCausalLM(self.config)
        if self.pretrained is not None:
            load_pretrained(self.llama, self.pretrained)
        if self.lora:
            self.llama = with_adapters(self.llama, self.lora)

    @property
    def in_pipeline(self) -> bool:
        return self._trainer is not None and isinstance(self._trainer.strategy, GPipeStrategy)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.loss(tokens, "train_loss")

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.loss(tokens, "val_loss")

    def loss(self, tokens: Tensor, name: str) -> Tensor:
        loss: Tensor = self.llama(input_ids=tokens, labels=tokens).loss
        self.log(name, loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = AdamW(trained, self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(
            optimizer, self.learning_rate, steps, pct_start=0.07, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def generate(self, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int) -> str:
        """Return `prompt` and `tokens` more, each sampled from the model's logits."""
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(self.device)
        found = self.llama.eval().generate(
            **given,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.7,
            use_cache=True,
        )
        return str(tokenizer.decode(found[0]))


def with_adapters(llama: LlamaForCausalLM, rank: int) -> Any:
    """Return a Llama with trainable LoRA adapters on its linear layers; the rest is frozen."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    adapted = get_peft_model(llama, LoraConfig(r=rank, target_modules="all-linear"))
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):  # peft creates adapters on their layer's device: meta
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return adapted


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocabulary": 300, "width": 32, "blocks": 2, "heads": 2, "learning_rate": 1e-2},
    "demo": {"vocabulary": 2048, "width": 192, "blocks": 4, "heads": 4},
    "large": {"vocabulary": 8192, "width": 768, "blocks": 12, "heads": 12, "learning_rate": 6e-4},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, validate the best checkpoint with and without a pipeline, report, and save."""
    parser = options_parser(__doc__, output="runs/finetune_llama", batch_size=16, steps=300)
    parser.add_argument("--size", choices=SIZES, default="demo", help="of a model without weights")
    parser.add_argument("--context", type=int, default=128, help="tokens in a row")
    parser.add_argument("--pretrained", help="a folder with weights and a tokenizer")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of adapters; 0: train all weights"
    )
    options = start(parser, arguments)

    size = SIZES[options.size]
    model = Llama(**size, pretrained=options.pretrained, lora=options.lora)
    data = TopicsTokens(
        options.context,
        options.batch_size,
        size["vocabulary"],
        options.pretrained,
        training_windows=options.steps * options.batch_size,
    )

    # The pipeline. It selects the blocks, which have most of the work.
    strategy = GPipeStrategy(options.balance, options.chunks, activation_checkpointing="never")

    best, measurements = ModelCheckpoint(filename="best", monitor="val_loss"), Measurements()
    trainer = L.Trainer(
        strategy="auto" if options.plain else strategy,
        max_epochs=1,
        val_check_interval=min(100, options.steps),
        gradient_clip_val=1.0,
        callbacks=[best, measurements],
        **trainer_arguments(options),  # devices, loggers
    )
    trainer.fit(model, data)

    pieces = len(data.tokenizer)
    guess = {"val_loss": unigram_loss(data.training, data.validation, pieces)}
    cost = measurements.cost("tokens", options.batch_size * options.context)
    reloaded = report(trainer, model, data, best, guess, cost)
    print(f"A sample:\n\n{reloaded.generate(data.tokenizer, 'The ', 60)}\n")

    folder = Path(str(trainer.log_dir), "llama")
    reloaded.llama.save_pretrained(folder)
    data.tokenizer.save_pretrained(folder)
    print(f"Weights and tokenizer: {folder}")


if __name__ == "__main__":
    main()
