"""A small hybrid language model made of the components, and the loss that every mesh gives alike.

Arguments that mean this wherever a function says nothing else:

    config, vocab_size   the model's sizes; of them that of the whole vocabulary
    layers               kinds of layers in order, "mamba" or "attention"
    placement            where this rank stands: its groups, and the order of tokens over cp
    order                that order, a kind of TokenLayout
    layouts              a TokenLayout of each stream
    dp_rank, cp_rank     this rank along dp and along cp
    cp_size              ranks along cp
    made                 dtype and device of what is made
"""

from torch_impl.models.batch import RankStream as RankStream
from torch_impl.models.batch import Stream as Stream
from torch_impl.models.batch import layout_of as layout_of
from torch_impl.models.batch import offsets_of as offsets_of
from torch_impl.models.batch import own_streams as own_streams
from torch_impl.models.batch import rank_stream as rank_stream
from torch_impl.models.config import HybridConfig as HybridConfig
from torch_impl.models.config import Placement as Placement
from torch_impl.models.hybrid import HybridLM as HybridLM
from torch_impl.models.hybrid import tensor_parallel_plan as tensor_parallel_plan
from torch_impl.models.loss import NOBODY as NOBODY
from torch_impl.models.loss import gradient_norm as gradient_norm
from torch_impl.models.loss import normalised as normalised
from torch_impl.models.loss import token_losses as token_losses
from torch_impl.models.loss import valid_count as valid_count
from torch_impl.models.staged import StepLoss as StepLoss
from torch_impl.models.staged import staged_step as staged_step
