"""The ways to do a step: ours, those of others, and none at all.

======================  ==========================================================================
``task``                the model, the mini-batch and the loss that all have in common
``plain``               one device, with or without micro-batches and ``torch.utils.checkpoint``
``ours``                lightning-gpipe
``torchgpipe``          torchgpipe 0.0.7
======================  ==========================================================================
"""
