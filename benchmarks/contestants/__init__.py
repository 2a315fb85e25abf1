"""Implementations of a step: ours, those of other packages, and without a pipeline.

======================  ==========================================================================
``task``                the model, the mini-batch and the loss, the same for all
``plain``               one device, with or without micro-batches and ``torch.utils.checkpoint``
``ours``                lightning-gpipe
``torchgpipe``          torchgpipe 0.0.7
``fairscale``           fairscale 0.4.13's Pipe
``pipelining``          torch.distributed.pipelining, in a process for each stage
``skips``               a model's skip connections with the API of another package
======================  ==========================================================================
"""
