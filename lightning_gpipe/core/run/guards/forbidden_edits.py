"""Refuses edits by layers in forward, and by the user between a forward and its backward.

In the plain module these are harmless. Here a parameter has a shadow while the layers run, and a
forward may run again in backward: it must then compute the same.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from lightning_gpipe.core.faithful import Shadows
from lightning_gpipe.core.run.activations import Activations, versions_in
from lightning_gpipe.core.run.stage import Stage


def check_edits(stage: Stage, shadows: Shadows, lost: Tensor | None = None) -> None:
    """Raise if a layer did to a parameter in forward what cannot be honoured: an edit or a hook.

    ``lost`` is one of which a copy was edited, beside those that the shadows know of.
    """
    hooked = shadows.hooked
    if hooked is not None:
        raise RuntimeError(
            "hooks on parameters must be registered outside of forward: got one on "
            f"{stage.name_of(hooked)}, registered while {stage} ran, where it would see the "
            "gradient of each micro-batch instead of the whole. Register it once, before the "
            "first step."
        )
    replaced = shadows.replaced
    if replaced is not None:
        raise RuntimeError(
            "the data of a parameter that is trained must not be replaced in forward: got other "
            f"data of {stage.name_of(replaced)}. Write weight.data.copy_(value) instead of "
            "weight.data = value."
        )
    lost = shadows.lost if lost is None else lost
    if lost is not None:
        raise RuntimeError(
            "a parameter that a stage has a copy of must not be edited in forward: got an edit of "
            f"{stage.name_of(lost)} or its attributes, whose home is not {stage}, so the edit "
            "would be lost. Edit it after the optimizer step, choose a balance in which layers "
            "that share it are on one device, or write weights='device' if it is 'host'."
        )
    frozen = [parameter for parameter in shadows.edited if not parameter.requires_grad]
    if not frozen:
        return
    recorded = set(map(id, stage.edited_parameters))
    new = next((parameter for parameter in frozen if id(parameter) not in recorded), None)
    if new is not None:
        raise RuntimeError(
            f"frozen parameters must be edited in every forward or in none: {stage} edited "
            f"{stage.name_of(new)} for the first time after an earlier run that did not, and "
            "the value before is needed for recomputation. Make it a buffer, or write "
            "activation_checkpointing='never'."
        )


def check_late_edit(error: RuntimeError, stage: Stage) -> None:
    """Raise instead of autograd's error if a tensor was edited that a backward needs."""
    if "modified by an inplace operation" in str(error):
        raise RuntimeError(
            "what a backward needs must not be edited between a forward and its backward: got an "
            f"edit in {stage}, by a layer of what its own backward needs, as in x.relu().add_(1), "
            "by a layer that runs for a later micro-batch, or by other code. The first fails in a "
            "plain module, too: compute a new tensor. If a layer edits its state, such as a frozen "
            "encoder that follows another one, write activation_checkpointing='always', which "
            "keeps the values of each micro-batch, call the encoder under torch.no_grad(), or edit "
            f"it after the optimizer step. PyTorch says: {error}"
        ) from error


def check_inputs_unchanged(stage: Stage, dropped: Collection[Activations]) -> None:
    """Raise if a recomputation would not begin with what forward began with."""
    if any(versions_in(each.inputs) != each.versions for each in dropped):
        raise RuntimeError(
            f"the input of {stage} must not be edited between a forward and its backward: got an "
            "edit in place of a micro-batch, and its forward is yet to be recomputed. Edit a copy, "
            "write the next batch after backward, or write activation_checkpointing='never'."
        )


def check_unchanged(
    stage: Stage,
    shadows: Shadows,
    modules: tuple[nn.Module, ...],
    activations: Collection[Activations],
) -> None:
    """Raise if a recomputation would not compute what forward computed."""
    dropped = [each for each in activations if each.roots is None]
    if not dropped:
        return
    check_inputs_unchanged(stage, dropped)
    if shadows.edited:
        rule, cause = "parameters must not be edited", "an edit, such as an optimizer step"
    elif any(each.saved is not None and each.saved.buffers.lost for each in dropped):
        # Or by a layer in a later micro-batch, for the first time, which keeps its activations.
        rule, cause = "buffers must not be edited", "an edit"
    elif stage.partition.modules != modules:
        rule, cause = "modules must not be added, removed or replaced", "other modules"
    else:
        return
    raise RuntimeError(
        f"{rule} between a forward and its backward: got {cause} in {stage}, and its forward is "
        "yet to be recomputed. Change the model after backward."
    )
