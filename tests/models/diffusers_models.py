"""Models of Hugging Face diffusers, small: U-Nets, diffusion transformers and autoencoders.

The U-Nets and autoencoders are four blocks down, one in the middle and four blocks up. A pipeline
takes the blocks down and the blocks up; what is in the middle runs between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import LabelEmbedding
from torch import Tensor, nn

from tests.models.case import ROWS, Case

diffusers.utils.logging.set_verbosity_error()  # about casts of models as small as ours

WORDS = 5
CAPTION = 16  # numbers per word
LABELS = 10

Value = Callable[[torch.Generator], Any]

# What models are called with.


def called_with(**given: tuple[int, ...] | Value) -> Callable[[torch.Generator], dict[str, Any]]:
    """Values of these shapes for each row, or of these functions."""

    def inputs(generator: torch.Generator) -> dict[str, Any]:
        return {
            name: torch.randn(ROWS, *value, generator=generator)
            if isinstance(value, tuple)
            else value(generator)
            for name, value in given.items()
        }

    return inputs


def noisy(**given: tuple[int, ...] | Value) -> Callable[[torch.Generator], dict[str, Any]]:
    """The same, and the step of the noise that each row has."""
    return called_with(timestep=_steps, **given)


def _steps(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 1000, (ROWS,), generator=generator)


def _labels(generator: torch.Generator) -> Tensor:
    return torch.randint(0, LABELS, (ROWS,), generator=generator)


def _mask(_: torch.Generator) -> Tensor:
    """Captions of which two have fewer words."""
    mask = torch.ones(ROWS, WORDS, dtype=torch.int64)
    mask[1, -3:] = mask[5, -2:] = 0
    return mask


def _positions(tokens: int, axes: int) -> Value:
    """A position for each token, the same in all rows."""
    return lambda _: torch.arange(tokens * axes).view(tokens, axes) % 4


def _always(value: Any) -> Value:
    return lambda _: value


def _sizes(generator: torch.Generator) -> Mapping[str, Tensor]:
    """A second caption for each row, and the sizes of its image."""
    return {
        "text_embeds": torch.randn(ROWS, CAPTION, generator=generator),
        "time_ids": torch.randint(1, 64, (ROWS, 6), generator=generator),
    }


WORDED = {"encoder_hidden_states": (WORDS, CAPTION)}
IMAGE = {"sample": (4, 16, 16)}
LATENT = {"hidden_states": (4, 8, 8)}
VIDEO = {"hidden_states": (4, 2, 8, 8)}
TOKENS = {"hidden_states": (16, 4)}

# What models are made from.

U_NET = {
    "block_out_channels": (8, 8, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
CONDITIONED = {**U_NET, "attention_head_dim": 2, "cross_attention_dim": CAPTION}
CODER = {
    "block_out_channels": (8, 8, 16, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
DEEP_CODER = {
    "latent_channels": 4,
    "attention_head_dim": 4,
    "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",),
    "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",),
    "encoder_block_out_channels": (8, 8, 16, 16),
    "decoder_block_out_channels": (8, 8, 16, 16),
    "encoder_layers_per_block": (1,) * 4,
    "decoder_layers_per_block": (1,) * 4,
    "encoder_qkv_multiscales": ((), (), (), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (5,)),
}
TRANSFORMER = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 16}
JOINT = {**TRANSFORMER, "joint_attention_dim": CAPTION, "in_channels": 4}
TWO_STACKS = {**JOINT, "num_single_layers": 4}
ROTARY = {"axes_dims_rope": (4, 4, 8)}

UP_AND_DOWN = "down_blocks up_blocks"
BOTH_STACKS = "transformer_blocks single_transformer_blocks"


class Controlled(nn.Module):
    """A U-Net with the ControlNet that steers it."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = diffusers.UNet2DConditionModel(**CONDITIONED)
        self.control = diffusers.ControlNetModel(
            **CONDITIONED, conditioning_embedding_out_channels=(4, 8)
        )

    def forward(
        self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, hint: Tensor
    ) -> Tensor:
        inputs = sample, timestep, encoder_hidden_states
        down, middle = self.control(*inputs, hint, return_dict=False)
        return self.unet(
            *inputs,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
        ).sample


def _build(kind: str, fields: Mapping[str, Any]) -> nn.Module:
    return _drop_nothing(getattr(diffusers, kind)(**fields))


def _drop_nothing(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, LabelEmbedding):
            module.dropout_prob = 0.0
    return model


def case(
    name: str,
    module: str,
    inputs: Callable[[torch.Generator], Mapping[str, Any]],
    fields: Mapping[str, Any],
    **more: Any,
) -> Case:
    """A case of a model of diffusers; ``named``, for a second one of its class."""
    paths = tuple(module.split())
    shown = more.pop("named", name)
    part = paths if len(paths) > 1 else module
    return Case(shown, partial(_build, name, fields), inputs, part, **more)


CASES = [
    # U-Nets.
    case("UNet2DModel", UP_AND_DOWN, noisy(sample=(3, 16, 16)), U_NET),
    case(
        "UNet2DModel",
        "",
        noisy(sample=(3, 16, 16)),
        U_NET,
        named="UNet2DModel (traced)",
        refused="it asks for the class of a value",
    ),
    case("UNet2DConditionModel", UP_AND_DOWN, noisy(**IMAGE, **WORDED), CONDITIONED, quick=True),
    case(
        "UNet2DConditionModel",
        UP_AND_DOWN,
        noisy(**IMAGE, **WORDED, added_cond_kwargs=_sizes, encoder_attention_mask=_mask),
        {
            **CONDITIONED,
            "transformer_layers_per_block": (1, 1, 2, 2),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 6 * 4 + CAPTION,
        },
        named="UNet2DConditionModel (as in SDXL)",
    ),
    case(
        "UNet2DConditionModel",
        UP_AND_DOWN,
        noisy(sample=(4, 20, 12), **WORDED),
        CONDITIONED,
        named="UNet2DConditionModel (odd sizes)",
    ),
    case(
        "ControlNetModel",
        "down_blocks",
        noisy(**IMAGE, **WORDED, controlnet_cond=(3, 32, 32)),
        {**CONDITIONED, "conditioning_embedding_out_channels": (4, 8)},
    ),
    Case(
        "ControlNetModel and UNet2DConditionModel",
        Controlled,
        noisy(**IMAGE, **WORDED, hint=(3, 32, 32)),
        ("control.down_blocks", "unet.down_blocks", "unet.up_blocks"),
    ),
    case(
        "UNet1DModel",
        UP_AND_DOWN,
        noisy(sample=(2, 64)),
        {
            "block_out_channels": (8, 8, 32, 32),
            "in_channels": 2,
            "extra_in_channels": 16,
            "down_block_types": ("DownBlock1DNoSkip", *("DownBlock1D",) * 2, "AttnDownBlock1D"),
            "up_block_types": ("AttnUpBlock1D", *("UpBlock1D",) * 2, "UpBlock1DNoSkip"),
        },
    ),
    case(
        "UNet3DConditionModel",
        UP_AND_DOWN,
        noisy(sample=(4, 2, 16, 16), **WORDED),
        {**CONDITIONED, "block_out_channels": (32,) * 4},
        refused="is invalid for input of size",  # its rows are frames, which belong together
    ),
    case(
        "UNetSpatioTemporalConditionModel",
        UP_AND_DOWN,
        noisy(sample=(2, 8, 16, 16), encoder_hidden_states=(1, CAPTION), added_time_ids=(3,)),
        {
            "block_out_channels": (32, 32, 64, 64),
            "layers_per_block": 1,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 24,
            "cross_attention_dim": CAPTION,
            "num_attention_heads": (2, 2, 4, 4),
            "num_frames": 2,
        },
        refused="must be in dim 0",
    ),
    case(
        "Kandinsky3UNet",
        UP_AND_DOWN,
        noisy(**IMAGE, **WORDED, encoder_attention_mask=_mask),
        {
            "block_out_channels": (8, 8, 16, 16),
            "groups": 4,
            "time_embedding_dim": 16,
            "attention_head_dim": 4,
            "cross_attention_dim": CAPTION,
            "encoder_hid_dim": CAPTION,
        },
        dtype=torch.float64,
        large=True,
    ),
    # Diffusion transformers.
    case(
        "DiTTransformer2DModel",
        "transformer_blocks",
        noisy(**LATENT, class_labels=_labels),
        {**TRANSFORMER, "sample_size": 8, "num_embeds_ada_norm": LABELS},
    ),
    case(
        "PixArtTransformer2DModel",
        "transformer_blocks",
        noisy(
            **LATENT,
            **WORDED,
            encoder_attention_mask=_mask,
            added_cond_kwargs=_always({"resolution": None, "aspect_ratio": None}),
        ),
        {**TRANSFORMER, "sample_size": 8, "caption_channels": CAPTION, "cross_attention_dim": 32},
    ),
    case(
        "SD3Transformer2DModel",
        "transformer_blocks",
        noisy(**LATENT, **WORDED, pooled_projections=(CAPTION,)),
        {
            **JOINT,
            "sample_size": 8,
            "caption_projection_dim": 32,
            "pooled_projection_dim": CAPTION,
            "pos_embed_max_size": 8,
            "out_channels": 4,
            "dual_attention_layers": (0, 1),
            "qk_norm": "rms_norm",
        },
        quick=True,
    ),
    case(
        "FluxTransformer2DModel",
        BOTH_STACKS,
        noisy(
            **TOKENS,
            **WORDED,
            pooled_projections=(CAPTION,),
            img_ids=_positions(16, 3),
            txt_ids=_positions(WORDS, 3),
        ),
        {**TWO_STACKS, **ROTARY, "pooled_projection_dim": CAPTION},
        quick=True,
    ),
    case(
        "Flux2Transformer2DModel",
        BOTH_STACKS,
        noisy(
            **TOKENS,
            **WORDED,
            guidance=(),
            img_ids=_positions(16, 4),
            txt_ids=_positions(WORDS, 4),
        ),
        {**TWO_STACKS, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16},
    ),
    case(
        "ChromaTransformer2DModel",
        BOTH_STACKS,
        noisy(**TOKENS, **WORDED, img_ids=_positions(16, 3), txt_ids=_positions(WORDS, 3)),
        {
            **TWO_STACKS,
            **ROTARY,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 2,
        },
    ),
    case(
        "QwenImageTransformer2DModel",
        "transformer_blocks",
        noisy(
            **TOKENS,
            **WORDED,
            encoder_hidden_states_mask=_mask,
            img_shapes=_always([[(1, 4, 4)]] * ROWS),
        ),
        {**JOINT, **ROTARY, "out_channels": 1},
    ),
    case(
        "AuraFlowTransformer2DModel",
        "joint_transformer_blocks single_transformer_blocks",
        noisy(**LATENT, **WORDED),
        {
            "sample_size": 8,
            "num_mmdit_layers": 4,
            "num_single_dit_layers": 4,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": CAPTION,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 64,
        },
    ),
    case(
        "SanaTransformer2DModel",
        "transformer_blocks",
        noisy(**LATENT, **WORDED, encoder_attention_mask=_mask),
        {
            **TRANSFORMER,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": CAPTION,
            "sample_size": 8,
        },
    ),
    case(
        "CogView4Transformer2DModel",
        "transformer_blocks",
        noisy(**LATENT, **WORDED, original_size=(2,), target_size=(2,), crop_coords=(2,)),
        {
            **TRANSFORMER,
            "in_channels": 4,
            "out_channels": 4,
            "text_embed_dim": CAPTION,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "pos_embed_max_size": 8,
            "sample_size": 8,
            "rope_axes_dim": (8, 8),
        },
    ),
    case(
        "HunyuanDiT2DModel",
        "blocks",
        called_with(
            timestep=(),
            **LATENT,
            **WORDED,
            text_embedding_mask=_mask,
            encoder_hidden_states_t5=(WORDS, CAPTION),
            text_embedding_mask_t5=_mask,
            image_meta_size=(6,),
            style=_always(torch.zeros(ROWS, dtype=torch.int64)),
            image_rotary_emb=_always((torch.ones(16, 16), torch.zeros(16, 16))),
        ),
        {
            **TRANSFORMER,
            "num_layers": 6,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 8,
            "hidden_size": 32,
            "cross_attention_dim": CAPTION,
            "cross_attention_dim_t5": CAPTION,
            "pooled_projection_dim": 8,
            "text_len": WORDS,
            "text_len_t5": WORDS,
            "activation_fn": "gelu-approximate",
        },
    ),
    case(
        "PriorTransformer",
        "transformer_blocks",
        noisy(hidden_states=(CAPTION,), proj_embedding=(CAPTION,), **WORDED, attention_mask=_mask),
        {**TRANSFORMER, "embedding_dim": CAPTION, "num_embeddings": WORDS},
    ),
    case(
        "Transformer2DModel",
        "transformer_blocks",
        called_with(hidden_states=(32, 8, 8), **WORDED),
        {
            **TRANSFORMER,
            "in_channels": 32,
            "norm_num_groups": 4,
            "cross_attention_dim": CAPTION,
        },
    ),
    # Videos and sounds.
    case(
        "CogVideoXTransformer3DModel",
        "transformer_blocks",
        noisy(hidden_states=(2, 4, 8, 8), **WORDED),
        {
            **TRANSFORMER,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": CAPTION,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": WORDS,
        },
    ),
    case(
        "LTXVideoTransformer3DModel",
        "transformer_blocks",
        noisy(
            **TOKENS,
            **WORDED,
            encoder_attention_mask=_mask,
            num_frames=_always(1),
            height=_always(4),
            width=_always(4),
        ),
        {
            **TRANSFORMER,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "caption_channels": CAPTION,
        },
    ),
    case(
        "MochiTransformer3DModel",
        "transformer_blocks",
        noisy(**VIDEO, **WORDED, encoder_attention_mask=_mask),
        {
            **TRANSFORMER,
            "in_channels": 4,
            "pooled_projection_dim": 16,
            "text_embed_dim": CAPTION,
            "time_embed_dim": 16,
            "max_sequence_length": WORDS,
        },
    ),
    case(
        "WanTransformer3DModel",
        "blocks",
        noisy(**VIDEO, **WORDED),
        {
            **TRANSFORMER,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": CAPTION,
            "freq_dim": 16,
            "ffn_dim": 32,
            "rope_max_seq_len": 32,
        },
    ),
    case(
        "HunyuanVideoTransformer3DModel",
        BOTH_STACKS,
        noisy(
            **VIDEO,
            **WORDED,
            encoder_attention_mask=_mask,
            pooled_projections=(CAPTION,),
            guidance=(),
        ),
        {
            **TRANSFORMER,
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 4,
            "num_refiner_layers": 1,
            "text_embed_dim": CAPTION,
            "pooled_projection_dim": CAPTION,
            "rope_axes_dim": (4, 4, 8),
        },
    ),
    case(
        "LatteTransformer3DModel",
        "transformer_blocks temporal_transformer_blocks",
        noisy(**VIDEO, **WORDED),
        {
            **TRANSFORMER,
            "in_channels": 4,
            "sample_size": 8,
            "patch_size": 2,
            "caption_channels": CAPTION,
            "cross_attention_dim": 32,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "video_length": 2,
        },
        refused="the values that they return are not known",  # its two lists take turns
    ),
    case(
        "StableAudioDiTModel",
        "transformer_blocks",
        noisy(
            hidden_states=(4, 16),
            **WORDED,
            global_hidden_states=(1, CAPTION),
            rotary_embedding=_always((torch.ones(17, 8), torch.zeros(17, 8))),
        ),
        {
            **TRANSFORMER,
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_key_value_attention_heads": 1,
            "cross_attention_dim": 16,
            "time_proj_dim": 16,
            "global_states_input_dim": CAPTION,
            "cross_attention_input_dim": CAPTION,
        },
    ),
    # Autoencoders.
    case(
        "AutoencoderKL",
        "encoder.down_blocks decoder.up_blocks",
        called_with(sample=(3, 16, 16)),
        CODER,
        quick=True,
    ),
    case(
        "AutoencoderKL",
        "encoder decoder",
        called_with(sample=(3, 16, 16)),
        CODER,
        named="AutoencoderKL (traced)",
    ),
    case(
        "VQModel", "encoder.down_blocks decoder.up_blocks", called_with(sample=(3, 16, 16)), CODER
    ),
    case(
        "AutoencoderTiny",
        "encoder.layers decoder.layers",
        called_with(sample=(3, 16, 16)),
        {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4},
    ),
    case("AutoencoderDC", "encoder.down_blocks", called_with(sample=(3, 32, 32)), DEEP_CODER),
    case(
        "AutoencoderDC",
        "decoder.up_blocks",
        called_with(sample=(3, 32, 32)),
        DEEP_CODER,
        named="AutoencoderDC (decoder)",
        refused="called once in every forward, in order",  # from the last to the first
    ),
]
