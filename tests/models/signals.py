"""Models of Hugging Face transformers for sounds and for time series, small.

Time series come with their past, of which some steps are not observed, and their future.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.case import ROWS
from tests.models.hugging_face import (
    ENCODER,
    IDS,
    LABELS,
    LENGTH,
    SEQUENCES,
    STACKS,
    T5,
    VOCABULARY,
    Fields,
    Inputs,
    case,
    classes,
    tokens,
)

PAST = 20
FUTURE = 6
CONTEXT = 12

# What models are called with.


def wave(generator: torch.Generator) -> dict[str, Tensor]:
    """Sounds, and the tokens that are heard in them."""
    return {"input_values": _sounds(generator), "labels": _heard(4, generator)}


def labelled_wave(generator: torch.Generator) -> dict[str, Tensor]:
    """Sounds, some of them padded at the end, with a label each."""
    mask = torch.ones(ROWS, 400, dtype=torch.int64)
    mask[1, -90:] = mask[5, -40:] = 0
    labels = classes(generator)
    return {"input_values": _sounds(generator), "attention_mask": mask, "labels": labels}


def spectrum(generator: torch.Generator) -> dict[str, Tensor]:
    """Spectra, and the tokens that are heard in them."""
    return {"input_features": _spectra(8, 40, generator), "labels": _heard(9, generator)}


def labelled_spectrum(generator: torch.Generator) -> dict[str, Tensor]:
    """Spectra with a label each."""
    return {"input_features": _spectra(8, 40, generator), "labels": classes(generator)}


def frames(generator: torch.Generator) -> dict[str, Tensor]:
    """Spectra with their frames in dim 1, some of them padded at the end, and what is heard."""
    mask = torch.ones(ROWS, 40, dtype=torch.int64)
    mask[1, -8:] = mask[5, -4:] = 0
    spectra = _spectra(40, 8, generator)
    return {"input_features": spectra, "attention_mask": mask, "labels": _heard(4, generator)}


def labelled_frames(generator: torch.Generator) -> dict[str, Tensor]:
    """Spectra with their frames in dim 1, and a label each."""
    return {"input_values": _spectra(40, 8, generator), "labels": classes(generator)}


def spoken(generator: torch.Generator) -> dict[str, Tensor]:
    """Texts, and the spectra of the same spoken."""
    texts = tokens(generator)
    texts["labels"] = _spectra(12, 8, generator)
    return texts | {"speaker_embeddings": torch.randn(ROWS, 8, generator=generator)}


def played(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of the codes of sounds, of two codebooks."""
    return {"input_ids": torch.randint(5, VOCABULARY, (ROWS * 2, LENGTH), generator=generator)}


def past(generator: torch.Generator) -> dict[str, Tensor]:
    """The past of two series each."""
    return {"past_values": torch.randn(ROWS, CONTEXT * 2, 2, generator=generator)}


def past_and_future(generator: torch.Generator) -> dict[str, Tensor]:
    """The past and the future of two series each."""
    return past(generator) | {"future_values": torch.randn(ROWS, FUTURE, 2, generator=generator)}


def dated(generator: torch.Generator) -> dict[str, Tensor]:
    """The past and the future of a series each, with features of the dates."""
    observed = torch.rand(ROWS, PAST, generator=generator) > 0.1
    return {
        "past_values": torch.randn(ROWS, PAST, generator=generator),
        "past_time_features": torch.randn(ROWS, PAST, 2, generator=generator),
        "past_observed_mask": observed.float(),
        "future_values": torch.randn(ROWS, FUTURE, generator=generator),
        "future_time_features": torch.randn(ROWS, FUTURE, 2, generator=generator),
    }


def patched(generator: torch.Generator) -> dict[str, Tensor]:
    """The past of a series each, padded at the beginning, with the kind of its frequency."""
    padding = torch.zeros(ROWS, CONTEXT * 2, dtype=torch.int64)
    padding[1, :8] = 1
    return {
        "past_values": torch.randn(ROWS, CONTEXT * 2, generator=generator),
        "past_values_padding": padding,
        "freq": torch.randint(0, 3, (ROWS, 1), generator=generator),
    }


def unlabelled(inputs: Inputs) -> Inputs:
    """The same without labels, for models with batch norms, of which no loss is compared."""
    return lambda generator: {k: x for k, x in inputs(generator).items() if k != "labels"}


def _sounds(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 400, generator=generator)


def _spectra(height: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, height, width, generator=generator)


def _heard(length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(5, VOCABULARY, (ROWS, length), generator=generator)


# What models are made from.

SOUND: Fields = IDS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,  # what is masked is drawn
    "num_labels": LABELS,
}
SQUEEZED = {**SOUND, "num_feat_extract_layers": 2, "classifier_proj_size": 16}
LISTENING = {
    **SEQUENCES,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "begin_suppress_tokens": None,  # more of them than there are words here
    "num_labels": LABELS,
}
SERIES = {
    "prediction_length": FUTURE,
    "context_length": CONTEXT,
    "lags_sequence": [1, 2, 3, 8],
    "num_time_features": 2,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
}
PATCHES = {
    "num_input_channels": 2,
    "context_length": CONTEXT * 2,
    "prediction_length": FUTURE,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
}

_BOTH = "model.encoder.layers model.decoder.layers"

CASES = [
    # Sounds.
    case("Wav2Vec2ForCTC", "wav2vec2.encoder.layers", wave, SOUND),
    case(
        "Wav2Vec2ForSequenceClassification",
        "wav2vec2.encoder.layers",
        labelled_wave,
        {**SOUND, "do_stable_layer_norm": True, "feat_extract_norm": "layer"},
    ),
    case(
        "Wav2Vec2ConformerForCTC",
        "wav2vec2_conformer.encoder.layers",
        unlabelled(wave),
        {**SOUND, "conv_depthwise_kernel_size": 5},
        mixes=True,
        dtype=torch.float64,
    ),
    case(
        "Wav2Vec2BertForCTC",
        "wav2vec2_bert.encoder.layers",
        frames,
        {**SOUND, "feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 5},
    ),
    case("HubertForCTC", "hubert.encoder.layers", wave, SOUND),
    case(
        "WavLMForCTC",
        "wavlm.encoder.layers",
        wave,
        {**SOUND, "num_buckets": 8, "max_bucket_distance": 16},
    ),
    case("UniSpeechForCTC", "unispeech.encoder.layers", wave, SOUND),
    case("UniSpeechSatForCTC", "unispeech_sat.encoder.layers", wave, SOUND),
    case(
        "Data2VecAudioForCTC",
        "data2vec_audio.encoder.layers",
        wave,
        {**SOUND, "conv_pos_kernel_size": 3},
    ),
    case("SEWForCTC", "sew.encoder.layers", wave, SQUEEZED),
    case(
        "SEWDForCTC",
        "sew_d.encoder.encoder.layer",
        wave,
        {**SQUEEZED, "position_buckets": 8, "max_position_embeddings": 64},
    ),
    case(
        "ASTForAudioClassification",
        "audio_spectrogram_transformer.layers",
        labelled_frames,
        {
            **ENCODER,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 40,
            "num_mel_bins": 8,
        },
    ),
    case("WhisperForConditionalGeneration", _BOTH, spectrum, LISTENING),
    case("WhisperForAudioClassification", "encoder.layers", labelled_spectrum, LISTENING),
    case(
        "Speech2TextForConditionalGeneration",
        _BOTH,
        frames,
        {**LISTENING, "input_feat_per_channel": 8, "conv_channels": 16},
    ),
    case(
        "MoonshineForConditionalGeneration",
        _BOTH,
        lambda generator: {
            "input_values": torch.randn(ROWS, 2000, generator=generator),
            "labels": _heard(9, generator),
        },
        {
            **IDS,
            "hidden_size": 32,
            "intermediate_size": 64,
            "encoder_num_hidden_layers": 4,
            "decoder_num_hidden_layers": 4,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "decoder_start_token_id": 1,
        },
    ),
    case(
        "ParakeetForCTC",
        "encoder.layers",
        unlabelled(frames),
        {
            "vocab_size": VOCABULARY,
            "pad_token_id": 0,
            "encoder_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "conv_kernel_size": 5,
                "subsampling_conv_channels": 8,
                "num_mel_bins": 8,
            },
        },
        mixes=True,
        dtype=torch.float64,
    ),
    case(
        "SpeechT5ForTextToSpeech",
        "speecht5.encoder.wrapped_encoder.layers speecht5.decoder.wrapped_decoder.layers",
        spoken,
        {
            **SOUND,
            **STACKS,
            "num_mel_bins": 8,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speaker_embedding_dim": 8,
            "decoder_start_token_id": 1,
        },
    ),
    case(
        "Pop2PianoForConditionalGeneration",
        "encoder.block decoder.block",
        lambda generator: {
            "inputs_embeds": torch.randn(ROWS, LENGTH, 32, generator=generator),
            "labels": _heard(9, generator),
        },
        T5,
    ),
    case(
        "MusicgenForCausalLM",
        "model.decoder.layers",
        played,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_codebooks": 2,
            "max_position_embeddings": 32,
            "pad_token_id": VOCABULARY,
            "bos_token_id": VOCABULARY,
        },
    ),
    # Time series.
    case("TimeSeriesTransformerForPrediction", _BOTH, dated, SERIES),
    case(
        "InformerForPrediction",
        _BOTH,
        dated,
        {**SERIES, "attention_type": "full", "distil": False},  # the other type draws its keys
        named="InformerForPrediction (full attention)",
    ),
    case(
        "InformerModel",
        "encoder.layers decoder.layers",
        dated,
        {**SERIES, "attention_type": "full"},
        named="InformerModel (distilling)",
        refused="edits a tensor in place that was made outside",  # batch norms between its blocks
    ),
    case(
        "AutoformerModel",
        "encoder.layers decoder.layers",
        dated,
        # With several heads, it pairs the values of a row with the delays of another one.
        {
            **SERIES,
            "label_length": 4,
            "moving_average": 5,
            "encoder_attention_heads": 1,
            "decoder_attention_heads": 1,
            "use_cache": False,  # the plain model runs on micro-batches, whose caches do not merge
        },
        named="AutoformerModel (one head)",
        mixes=True,
    ),
    case(
        "PatchTSTForPrediction",
        "model.encoder.layers",
        past_and_future,
        {**PATCHES, "num_hidden_layers": 4, "ffn_dim": 32, "norm_type": "layernorm"},
    ),
    case(
        "PatchTSTForPrediction",
        "model.encoder.layers",
        past,
        {**PATCHES, "num_hidden_layers": 4, "ffn_dim": 32, "channel_attention": True},
        named="PatchTSTForPrediction (batch norms)",
        mixes=True,
        dtype=torch.float64,
    ),
    case(
        "PatchTSMixerForPrediction",
        "model.encoder.mlp_mixer_encoder.mixers",
        past_and_future,
        {**PATCHES, "num_layers": 4, "mode": "mix_channel", "self_attn": True},
    ),
    case(
        "TimesFmModel",
        "layers",
        patched,
        {
            "patch_length": 4,
            "context_length": CONTEXT * 2,
            "horizon_length": FUTURE,
            "num_hidden_layers": 4,
            "hidden_size": 32,
            "intermediate_size": 32,
            "head_dim": 8,
            "num_attention_heads": 4,
        },
    ),
]
