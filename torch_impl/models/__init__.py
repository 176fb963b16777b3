"""A small hybrid language model built from the components, with a loss that is the same on every mesh.

These arguments mean the same throughout the package, unless a function says otherwise:

    config, vocab_size   the model's sizes; the size of the full vocabulary
    layers               kinds of layers in order, "mamba", "attention" or "moe"
    placement            the groups of this rank, and the order of tokens over cp
    order                the order of tokens over cp, a kind of TokenLayout
    layouts              the TokenLayout of each stream
    dp_rank, cp_rank     this rank along dp and along cp
    cp_size              ranks along cp
    factory              dtype and device of new parameters
"""

from torch_impl.models.batch import RankStream as RankStream
from torch_impl.models.batch import Stream as Stream
from torch_impl.models.batch import layout_of as layout_of
from torch_impl.models.batch import offsets_of as offsets_of
from torch_impl.models.batch import rank_stream as rank_stream
from torch_impl.models.batch import streams_of_rank as streams_of_rank
from torch_impl.models.config import HybridConfig as HybridConfig
from torch_impl.models.config import Placement as Placement
from torch_impl.models.contrastive import contrastive_loss as contrastive_loss
from torch_impl.models.hybrid import HybridLM as HybridLM
from torch_impl.models.hybrid import tensor_parallel_plan as tensor_parallel_plan
from torch_impl.models.loss import IGNORED as IGNORED
from torch_impl.models.loss import loss_divisors as loss_divisors
from torch_impl.models.loss import normalised as normalised
from torch_impl.models.loss import token_losses as token_losses
from torch_impl.models.loss import valid_count as valid_count
from torch_impl.models.multi_token import multi_token_losses as multi_token_losses
from torch_impl.models.multi_token import multi_token_targets as multi_token_targets
from torch_impl.models.staged import StepLoss as StepLoss
from torch_impl.models.staged import staged_step as staged_step
