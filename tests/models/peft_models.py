"""Models with adapters of PEFT, some of them on quantised weights, as people fine-tune them.

Adapters begin as the identity; the comparison moves their weights away from it. Weights in 4 and 8
bits are those of bitsandbytes and torchao, which have kernels for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import bitsandbytes as bnb
import peft
import torch
import transformers
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tests.models import hugging_face
from tests.models.case import Case
from tests.models.hugging_face import GROUPED, T5, VOCABULARY, Inputs, pair, tokens
from tests.support.language_models import llama as quantisable_llama

WIDTH = 64  # a block of weights in 4 bits
QUANTISABLE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_key_value_heads": 2,
    "use_cache": True,
}
PATH = "base_model.model.model.layers"
ATTENTION = ["q_proj", "v_proj"]
ALL_LINEAR = [*ATTENTION, "down_proj"]


def in_4_bits(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear4bit(
        WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", module=made
    )
    return made


def in_8_bits(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    return made


def of_torchao(linear: nn.Linear) -> nn.Module:
    quantize_(linear, Int8WeightOnlyConfig())
    return linear


def quantised_llama(quantised: Callable[[nn.Linear], nn.Module], **changed: Any) -> Any:
    """A Llama whose blocks have quantised layers, on its device."""
    model = quantisable_llama(**QUANTISABLE | changed)
    for parent in [each for each in model.model.layers.modules() if type(each) is not nn.Linear]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, quantised(child))
    return model.to("cpu")


def _loaded_in_4_bits() -> nn.Module:
    """A Llama that transformers quantises when it loads it, prepared as QLoRA has it."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with TemporaryDirectory() as folder:
        quantisable_llama(**QUANTISABLE).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, device_map="cpu"
        )
    made: nn.Module = peft.prepare_model_for_kbit_training(model)
    return made


def _adapted(base: Callable[[], Any], kind: str, options: dict[str, Any]) -> nn.Module:
    made: nn.Module = peft.get_peft_model(base(), getattr(peft, kind)(**options))
    for module in made.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # Else some CPUs pack the weights otherwise in their first call in evaluation.
            module.support_avx512bf16_for_cpu = False
    return made


def _small(name: str, fields: Any) -> Callable[[], nn.Module]:
    return partial(hugging_face.build, name, fields)


LLAMA = _small("LlamaForCausalLM", GROUPED)


def case(
    name: str,
    kind: str = "LoraConfig",
    base: Callable[[], Any] = LLAMA,
    module: str | tuple[str, ...] = PATH,
    inputs: Inputs = tokens,
    refused: str | None = None,
    quick: bool = False,
    **options: Any,
) -> Case:
    """A case of a base model with such an adapter."""
    build = partial(_adapted, base, kind, options)
    return Case(name, build, inputs, module, refused=refused, quick=quick)


def prompt(name: str, kind: str, **options: Any) -> Case:
    """A case of a Llama before whose words others are learned."""
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4, **options}
    return case(name, kind, module="base_model.model.layers", **options)


CASES = [
    case("Llama, LoRA", target_modules=ALL_LINEAR, r=4, quick=True),
    case("Llama, LoRA of all linear layers", target_modules="all-linear", r=4, use_rslora=True),
    case("Llama, DoRA", target_modules=ALL_LINEAR, r=4, use_dora=True),
    case("Llama, LoRA and biases", target_modules=ATTENTION, r=4, bias="lora_only", lora_bias=True),
    case(
        "Llama, LoRA of some blocks, and its head",
        target_modules=ATTENTION,
        r=4,
        layers_to_transform=[0, 2],
        modules_to_save=["lm_head"],
    ),
    case(
        "Llama, LoRA and trainable tokens",
        target_modules=ATTENTION,
        r=4,
        trainable_token_indices=[1, 5],
    ),
    case(
        "GPT2, LoRA",
        base=_small("GPT2LMHeadModel", hugging_face.GPT),
        module="base_model.model.transformer.h",
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        r=4,
    ),
    case(
        "Mixtral, LoRA",
        base=_small("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
        target_modules=ATTENTION,
        r=4,
    ),
    case(
        "T5, LoRA",
        base=_small("T5ForConditionalGeneration", T5),
        module=("base_model.model.encoder.block", "base_model.model.decoder.block"),
        inputs=pair,
        target_modules=["q", "v"],
        r=4,
    ),
    case("Llama, AdaLoRA", "AdaLoraConfig", target_modules=ATTENTION, total_step=10),
    case("Llama, LoHa", "LoHaConfig", target_modules=ATTENTION, r=4),
    case("Llama, LoKr", "LoKrConfig", target_modules=ATTENTION, r=4),
    case("Llama, OFT", "OFTConfig", target_modules=ATTENTION, oft_block_size=8),
    case("Llama, HRA", "HRAConfig", target_modules=ATTENTION, r=4),
    case("Llama, FourierFT", "FourierFTConfig", target_modules=ATTENTION, n_frequency=8),
    case(
        "Llama, VeRA",
        "VeraConfig",
        refused="must not share modules",  # all blocks have the same matrices
        target_modules=["q_proj"],
        r=4,
    ),
    case(
        "Llama, VB-LoRA",
        "VBLoRAConfig",
        refused="must not share modules",  # all blocks have the same vectors
        target_modules=["q_proj"],
        r=4,
        num_vectors=8,
        vector_length=16,
        topk=2,
    ),
    case(
        "Llama, IA3",
        "IA3Config",
        target_modules=ALL_LINEAR,
        feedforward_modules=["down_proj"],
    ),
    case("Llama, LN tuning", "LNTuningConfig", target_modules=["input_layernorm"]),
    case(
        "Llama, adaption prompt",
        "AdaptionPromptConfig",
        task_type="CAUSAL_LM",
        adapter_len=4,
        adapter_layers=2,
    ),
    prompt("Llama, prompt tuning", "PromptTuningConfig"),
    prompt("Llama, P-tuning", "PromptEncoderConfig", encoder_hidden_size=16),
    prompt("Llama, prefix tuning", "PrefixTuningConfig", refused="must be empty"),  # the cache
    # Quantised.
    case(
        "Llama in 4 bits (bitsandbytes), LoRA",
        base=partial(quantised_llama, in_4_bits),
        target_modules=ALL_LINEAR,
        r=4,
        quick=True,
    ),
    case(
        "Llama in 4 bits (bitsandbytes), DoRA",
        base=partial(quantised_llama, in_4_bits),
        target_modules=ALL_LINEAR,
        r=4,
        use_dora=True,
    ),
    case("Llama loaded in 4 bits, QLoRA", base=_loaded_in_4_bits, target_modules=ALL_LINEAR, r=4),
    case(
        "Llama in 8 bits (bitsandbytes), LoRA",
        base=partial(quantised_llama, in_8_bits),
        target_modules=ALL_LINEAR,
        r=4,
    ),
    case(
        "Llama in 8 bits (torchao), LoRA",
        base=partial(quantised_llama, of_torchao),
        target_modules=ALL_LINEAR,
        r=4,
    ),
]
