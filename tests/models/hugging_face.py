"""Models of Hugging Face transformers, small: four blocks or more, of width 32.

The names of their configurations' fields differ from family to family, and so do the groups below.
They have the defaults of their families, such as ``use_cache=True``, but for sizes, for what a
comment says, and for dropout, which is 0: a pipeline draws other masks for its micro-batches than
the plain model for the mini-batch, and outputs could not be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.models.case import ROWS, Case

VOCABULARY = 64
LENGTH = 11
LABELS = 3

Inputs = Callable[[torch.Generator], dict[str, Any]]
Fields = Mapping[str, Any]

# What models are called with.


def tokens(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of tokens, some of them padded at the end, whose next tokens are the labels."""
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -4:] = mask[5, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of tokens, for models that have no mask."""
    ids = tokens(generator)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def document(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of tokens with a label each."""
    return tokens(generator) | {"labels": classes(generator)}


def page(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of tokens with their boxes on a page."""
    corners = torch.randint(0, 32, (ROWS, LENGTH, 4), generator=generator).sort(-1).values
    return document(generator) | {"bbox": corners[..., [0, 2, 1, 3]]}


def pair(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of tokens, and what the decoder makes of them, of another length."""
    targets = torch.randint(5, VOCABULARY, (ROWS, 9), generator=generator)
    return tokens(generator) | {"labels": targets}


def image(generator: torch.Generator) -> dict[str, Tensor]:
    """Images with a label each."""
    return pixels(generator) | {"labels": classes(generator)}


def pixels(generator: torch.Generator) -> dict[str, Tensor]:
    """Images of 32 by 32."""
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator)}


def captioned(generator: torch.Generator) -> dict[str, Any]:
    """Images, and as many texts."""
    texts = tokens(generator)
    texts.pop("labels")
    return pixels(generator) | texts | {"return_loss": True}


def masked_image(generator: torch.Generator) -> dict[str, Tensor]:
    """Images, and the noise by which patches are masked."""
    return pixels(generator) | {"noise": torch.rand(ROWS, 16, generator=generator)}


def depth(generator: torch.Generator) -> dict[str, Tensor]:
    """Images, without labels."""
    return pixels(generator)


def classes(generator: torch.Generator) -> Tensor:
    """A label for each row."""
    return torch.randint(0, LABELS, (ROWS,), generator=generator)


# What models are made from.

IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = IDS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = DECODER | {"num_key_value_heads": 2}
GPT = IDS | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
ENCODER = IDS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "num_labels": LABELS,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": LABELS,
}
PYRAMID = {
    "image_size": 32,
    "num_labels": LABELS,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 2, 1],
}
STACKS = {
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
}
SEQUENCES = IDS | STACKS | {"d_model": 32, "max_position_embeddings": 32}
T5 = IDS | {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 4,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
RECURRENT = GROUPED | {"num_hidden_layers": 6, "lru_width": 32, "attention_window_size": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _drop_nothing(config: transformers.PretrainedConfig) -> None:
    """Set all probabilities by which something is dropped to 0."""
    for name, value in [*vars(config).items()]:
        if isinstance(value, transformers.PretrainedConfig):
            _drop_nothing(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def build(name: str, fields: Fields) -> nn.Module:
    kind = getattr(transformers, name)
    config = kind.config_class(**fields)
    _drop_nothing(config)
    return kind(config)


def case(name: str, module: str, inputs: Inputs, fields: Fields, **more: Any) -> Case:
    paths = tuple(module.split())
    made = partial(build, name, fields)
    shown = more.pop("named", name)
    return Case(shown, made, inputs, paths[0] if len(paths) == 1 else paths, **more)


CASES = [
    # Decoders.
    case("GPT2LMHeadModel", "transformer.h", tokens, GPT, quick=True),
    case(
        "GPTNeoForCausalLM",
        "transformer.h",
        tokens,
        IDS
        | {
            "hidden_size": 32,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
            "max_position_embeddings": 32,
        },
    ),
    case("GPTNeoXForCausalLM", "gpt_neox.layers", tokens, DECODER),
    case("GPTJForCausalLM", "transformer.h", tokens, GPT | {"rotary_dim": 4}),
    case("GPTBigCodeForCausalLM", "transformer.h", tokens, GPT),
    case("CodeGenForCausalLM", "transformer.h", tokens, GPT | {"rotary_dim": 4, "n_ctx": 32}),
    case(
        "OPTForCausalLM",
        "model.decoder.layers",
        tokens,
        DECODER | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    case("BioGptForCausalLM", "biogpt.layers", tokens, DECODER),
    case(
        "XGLMForCausalLM",
        "model.layers",
        tokens,
        IDS
        | {
            "d_model": 32,
            "ffn_dim": 64,
            "num_layers": 4,
            "attention_heads": 4,
            "max_position_embeddings": 32,
        },
    ),
    case("FalconForCausalLM", "transformer.h", tokens, DECODER),
    case(
        "FalconForCausalLM",
        "transformer.h",
        tokens,
        DECODER | {"alibi": True},
        named="FalconForCausalLM (alibi)",
    ),
    case(
        "MptForCausalLM",
        "transformer.blocks",
        tokens,
        IDS | {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 32},
    ),
    case(
        "BloomForCausalLM",
        "transformer.h",
        tokens,
        IDS | {"hidden_size": 32, "n_layer": 4, "n_head": 4},
    ),
    case("LlamaForCausalLM", "model.layers", tokens, GROUPED, quick=True),
    case("MistralForCausalLM", "model.layers", tokens, GROUPED | {"sliding_window": 4}),
    case("Qwen2ForCausalLM", "model.layers", tokens, GROUPED),
    case(
        "Qwen2MoeForCausalLM",
        "model.layers",
        tokens,
        GROUPED | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    case("Qwen3ForCausalLM", "model.layers", tokens, GROUPED | {"head_dim": 8}),
    case(
        "Qwen3MoeForCausalLM",
        "model.layers",
        tokens,
        GROUPED | EXPERTS | {"num_experts": 4, "head_dim": 8},
    ),
    case("GemmaForCausalLM", "model.layers", tokens, GROUPED | {"head_dim": 8}),
    case(
        "Gemma2ForCausalLM",
        "model.layers",
        tokens,
        GROUPED | {"head_dim": 8, "sliding_window": 4},
    ),
    case(
        "Gemma3ForCausalLM",
        "model.layers",
        tokens,
        GROUPED | {"head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2},
        quick=True,
    ),
    case("PhiForCausalLM", "model.layers", tokens, DECODER),
    case("Phi3ForCausalLM", "model.layers", tokens, GROUPED),
    case("StableLmForCausalLM", "model.layers", tokens, GROUPED),
    case("CohereForCausalLM", "model.layers", tokens, GROUPED),
    case("Cohere2ForCausalLM", "model.layers", tokens, GROUPED | {"sliding_window": 4}),
    case("OlmoForCausalLM", "model.layers", tokens, GROUPED),
    case("Olmo2ForCausalLM", "model.layers", tokens, GROUPED),
    case("GraniteForCausalLM", "model.layers", tokens, GROUPED),
    case("SmolLM3ForCausalLM", "model.layers", tokens, GROUPED),
    case("NemotronForCausalLM", "model.layers", tokens, GROUPED | {"head_dim": 8}),
    case("Starcoder2ForCausalLM", "model.layers", tokens, GROUPED),
    case("GlmForCausalLM", "model.layers", tokens, GROUPED | {"head_dim": 8}),
    case("Glm4ForCausalLM", "model.layers", tokens, GROUPED | {"head_dim": 8}),
    case("PersimmonForCausalLM", "model.layers", tokens, DECODER),
    case("HeliumForCausalLM", "model.layers", tokens, GROUPED | {"head_dim": 8}),
    case("Exaone4ForCausalLM", "model.layers", tokens, GROUPED | {"sliding_window": 4}),
    case("Ernie4_5ForCausalLM", "model.layers", tokens, GROUPED | {"head_dim": 8}),
    case("ArceeForCausalLM", "model.layers", tokens, GROUPED),
    case("ApertusForCausalLM", "model.layers", tokens, GROUPED),
    case("SeedOssForCausalLM", "model.layers", tokens, GROUPED | {"head_dim": 8}),
    # Mixtures of experts.
    case("MixtralForCausalLM", "model.layers", tokens, GROUPED | {"num_local_experts": 4}),
    case(
        "MixtralForCausalLM",
        "model.layers",
        tokens,
        GROUPED | {"num_local_experts": 4, "output_router_logits": True},
        named="MixtralForCausalLM (router loss)",
        quick=True,
    ),
    case(
        "OlmoeForCausalLM",
        "model.layers",
        tokens,
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    case(
        "PhimoeForCausalLM",
        "model.layers",
        tokens,
        # Noise is drawn as dropout is.
        GROUPED | {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    ),
    case(
        "GptOssForCausalLM",
        "model.layers",
        tokens,
        GROUPED
        | {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    # State-space and recurrent models.
    case(
        "JambaForCausalLM",
        "model.layers",
        tokens,
        GROUPED
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    case(
        "RwkvForCausalLM",
        "rwkv.blocks",
        unpadded,
        IDS
        | {
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "context_length": 32,
            # In evaluation the plain model has no backward with it: it edits its state in place.
            "use_cache": False,
        },
    ),
    case(
        "MambaForCausalLM",
        "backbone.layers",
        unpadded,
        IDS
        | {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "state_size": 4,
            "time_step_rank": 4,
        },
        quick=True,
    ),
    case(
        "Mamba2ForCausalLM",
        "backbone.layers",
        unpadded,
        IDS
        | {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 4,
            "chunk_size": 4,
        },
    ),
    case(
        "FalconMambaForCausalLM",
        "backbone.layers",
        unpadded,
        IDS
        | {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "state_size": 4,
            "time_step_rank": 4,
        },
    ),
    case(
        "RecurrentGemmaForCausalLM",
        "model.layers",
        tokens,
        RECURRENT | {"use_cache": False},  # see the next one
    ),
    case(
        "RecurrentGemmaForCausalLM",
        "model.layers",
        tokens,
        RECURRENT,
        named="RecurrentGemmaForCausalLM (cache)",
        refused="that a layer has kept aside, in an attribute",  # the states of its recurrences
    ),
    # Encoders.
    case("BertForMaskedLM", "bert.encoder.layer", tokens, ENCODER, quick=True),
    case("BertForSequenceClassification", "bert.encoder.layer", document, ENCODER),
    case("RobertaForMaskedLM", "roberta.encoder.layer", tokens, ENCODER),
    case("XLMRobertaForSequenceClassification", "roberta.encoder.layer", document, ENCODER),
    case("CamembertForMaskedLM", "roberta.encoder.layer", tokens, ENCODER),
    case("Data2VecTextForMaskedLM", "data2vec_text.encoder.layer", tokens, ENCODER),
    case(
        "DistilBertForMaskedLM",
        "distilbert.transformer.layer",
        tokens,
        IDS
        | {
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 4,
            "n_heads": 4,
            "max_position_embeddings": 32,
        },
    ),
    case("ElectraForMaskedLM", "electra.encoder.layer", tokens, ENCODER | {"embedding_size": 16}),
    case(
        "DebertaV2ForMaskedLM",
        "deberta.encoder.layer",
        tokens,
        ENCODER
        | {
            "relative_attention": True,
            "pos_att_type": "p2c|c2p",
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "max_relative_positions": 16,
        },
    ),
    case("DebertaForMaskedLM", "deberta.encoder.layer", tokens, ENCODER),
    case("MPNetForMaskedLM", "mpnet.encoder.layer", tokens, ENCODER),
    case(
        "ModernBertForSequenceClassification",
        "model.layers",
        document,
        ENCODER | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    ),
    case("ErnieForMaskedLM", "ernie.encoder.layer", tokens, ENCODER),
    case("ConvBertForMaskedLM", "convbert.encoder.layer", tokens, ENCODER | {"embedding_size": 16}),
    case("RoFormerForMaskedLM", "roformer.encoder.layer", tokens, ENCODER | {"embedding_size": 16}),
    case(
        "SqueezeBertForMaskedLM",
        "transformer.encoder.layers",
        tokens,
        ENCODER | {"embedding_size": 32},
        refused=r"calls block\.forward",
    ),
    case("FNetForMaskedLM", "fnet.encoder.layer", unpadded, ENCODER | {"tpu_short_seq_length": 11}),
    case("LayoutLMForSequenceClassification", "layoutlm.encoder.layer", page, ENCODER),
    case(
        "LongformerForMaskedLM",
        "longformer.encoder.layer",
        tokens,
        ENCODER | {"attention_window": [4] * 4, "sep_token_id": 2},
    ),
    case(
        "NystromformerForMaskedLM",
        "nystromformer.encoder.layer",
        tokens,
        ENCODER | {"segment_means_seq_len": 11, "num_landmarks": 11},
    ),
    case(
        "AlbertForMaskedLM",
        "albert.encoder.albert_layer_groups",
        tokens,
        ENCODER | {"embedding_size": 16, "num_hidden_groups": 4},
        named="AlbertForMaskedLM (four groups)",
    ),
    case(
        "AlbertForMaskedLM",
        "albert.encoder.albert_layer_groups",
        tokens,
        ENCODER | {"embedding_size": 16},
        refused="at least one layer",  # one module, which runs four times
    ),
    case(
        "XLNetLMHeadModel",
        "transformer.layer",
        tokens,
        IDS | {"d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 64, "mem_len": None},
        refused="must be in dim 0",  # they are in dim 1
    ),
    # Vision.
    case("ViTForImageClassification", "vit.layers", image, VISION, quick=True),
    case("DeiTForImageClassification", "deit.layers", image, VISION),
    case(
        "BeitForImageClassification",
        "beit.layers",
        image,
        VISION | {"use_relative_position_bias": True},
    ),
    case(
        "Data2VecVisionForImageClassification",
        "data2vec_vision.encoder.layer",
        image,
        VISION | {"use_shared_relative_position_bias": True},
    ),
    case("Dinov2ForImageClassification", "dinov2.encoder.layer", image, VISION),
    case(
        "ViTMAEForPreTraining",
        "vit.layers decoder.decoder_layers",
        masked_image,
        VISION
        | {
            "decoder_hidden_size": 16,
            "decoder_intermediate_size": 32,
            "decoder_num_hidden_layers": 4,
            "decoder_num_attention_heads": 2,
        },
    ),
    case("ViTMSNForImageClassification", "vit.layers", image, VISION),
    case(
        "YolosForObjectDetection",
        "vit.encoder.layer",
        pixels,
        VISION | {"image_size": [32, 32], "num_detection_tokens": 5},
    ),
    case(
        "SiglipForImageClassification",
        "vision_model.encoder.layers",
        image,
        {"vision_config": VISION, "num_labels": LABELS},
    ),
    case(
        "SwinForImageClassification",
        "swin.encoder.layers",
        image,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1, 2, 1],
            "num_heads": [1, 2, 2, 4],
            "window_size": 2,
            "num_labels": LABELS,
        },
    ),
    case(
        "SegformerForImageClassification",
        "segformer.stages",
        image,
        PYRAMID | {"num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
    ),
    case(
        "ConvNextForImageClassification",
        "convnext.encoder.stages",
        image,
        PYRAMID | {"patch_size": 2},
    ),
    case(
        "ConvNextV2ForImageClassification",
        "convnextv2.encoder.stages",
        image,
        PYRAMID | {"patch_size": 2},
    ),
    case(
        "DPTForDepthEstimation",
        "dpt.encoder.layer",
        depth,
        VISION
        | {
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "reassemble_factors": [2, 1, 1, 0.5],
        },
    ),
    # Two stacks.
    case(
        "CLIPModel",
        "text_model.encoder.layers vision_model.encoder.layers",
        captioned,
        {
            "text_config": ENCODER,
            "vision_config": VISION,
            "projection_dim": 16,
        },
    ),
    case(
        "SiglipModel",
        "text_model.encoder.layers vision_model.encoder.layers",
        captioned,
        {"text_config": ENCODER | {"projection_size": 32}, "vision_config": VISION},
    ),
    case("T5ForConditionalGeneration", "encoder.block decoder.block", pair, T5, quick=True),
    case("MT5ForConditionalGeneration", "encoder.block decoder.block", pair, T5),
    case(
        "BartForConditionalGeneration", "model.encoder.layers model.decoder.layers", pair, SEQUENCES
    ),
    case(
        "MBartForConditionalGeneration",
        "model.encoder.layers model.decoder.layers",
        pair,
        SEQUENCES,
    ),
    case("MarianMTModel", "model.encoder.layers model.decoder.layers", pair, SEQUENCES),
    case(
        "PegasusForConditionalGeneration",
        "model.encoder.layers model.decoder.layers",
        pair,
        SEQUENCES,
    ),
    case(
        "M2M100ForConditionalGeneration",
        "model.encoder.layers model.decoder.layers",
        pair,
        SEQUENCES,
    ),
    case(
        "LEDForConditionalGeneration",
        "led.encoder.layers led.decoder.layers",
        pair,
        SEQUENCES
        | {
            "attention_window": [4] * 4,
            "max_encoder_position_embeddings": 32,
            "max_decoder_position_embeddings": 32,
        },
    ),
]
