"""What is measured: models with published pipeline figures, and two more. Most are Sequentials.

=================  ==========================================================================
``unet``           Ronneberger et al. (2015), arXiv:1505.04597, as torchgpipe measures it
``amoebanetd``     Real et al. (2018), arXiv:1802.01548; measured by GPipe, arXiv:1811.06965
``resnet101``      He et al. (2015), arXiv:1512.03385
``transformer``    blocks that are all alike: no published figures, but halves that cost the same
``llama``          blocks in an nn.ModuleList: no nn.Sequential, and no published figures
=================  ==========================================================================

Those of the papers are written from them. What they leave open, such as the widths within a U-Net,
follows from the numbers of layers and parameters in torchgpipe's report (Kim et al. 2020,
arXiv:2004.09910): the counts of all published sizes are met exactly, see
``tests/benchmarks/test_models.py``. Built under ``torch.device("meta")`` they take no memory.
"""

from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.llama import Llama as llama
from benchmarks.models.resnet import resnet101
from benchmarks.models.transformer import transformer
from benchmarks.models.unet import unet

__all__ = ["amoebanetd", "llama", "resnet101", "transformer", "unet"]
