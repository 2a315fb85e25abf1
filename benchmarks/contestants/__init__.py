"""The ways to do a step: ours, those of others, and none at all.

======================  ==========================================================================
``task``                the model, the mini-batch and the loss that all have in common
``plain``               one device, with or without micro-batches and ``torch.utils.checkpoint``
``ours``                lightning-gpipe
``torchgpipe``          torchgpipe 0.0.7
``fairscale``           fairscale 0.4.13's Pipe
``pipelining``          torch.distributed.pipelining, in a process for each stage
``skips``               a model's skip connections in the words of another package
======================  ==========================================================================
"""
