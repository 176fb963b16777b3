"""The Mamba2 mixer, the gated delta rule and the short convolution, and their context parallelism.

These arguments mean the same throughout the package, unless a function says otherwise:

    num_heads, head_dim   H heads of P channels each
    n_groups, d_state     G groups of heads that share B and C, and N state elements per channel
    d_conv                K taps of the convolution
    projected_states      the output of in_proj: the columns z|x|B|C|dt of each token
    cu_seqlens            padded offsets of the sequences in the full packed stream; None for a batch of rows
    layout                the TokenLayout of this batch; it overrides the strategy's layout
    cp_group              the ranks over which the tokens are sharded
    batch_size            rows of a 3-D input; 1 for a stream
"""

from torch_impl.layouts import _deinterleave_packed_seqs as _deinterleave_packed_seqs
from torch_impl.layouts import _redo_attention_load_balancing as _redo_attention_load_balancing
from torch_impl.layouts import _reinterleave_packed_seqs as _reinterleave_packed_seqs
from torch_impl.layouts import _reorder_chunks as _reorder_chunks
from torch_impl.layouts import _undo_attention_load_balancing as _undo_attention_load_balancing
from torch_impl.mamba.all_to_all import _all_to_all as _all_to_all
from torch_impl.mamba.all_to_all import _all_to_all_cp2hp as _all_to_all_cp2hp
from torch_impl.mamba.all_to_all import _all_to_all_hp2cp as _all_to_all_hp2cp
from torch_impl.mamba.all_to_all import _AllToAll as _AllToAll
from torch_impl.mamba.convolution_halo import causal_conv_over_cp as causal_conv_over_cp
from torch_impl.mamba.convolution_halo import convolution_halo as convolution_halo
from torch_impl.mamba.cost import MambaCost as MambaCost
from torch_impl.mamba.cost import mamba_cp_bytes as mamba_cp_bytes
from torch_impl.mamba.delta_rule import gated_delta_rule as gated_delta_rule
from torch_impl.mamba.hidden_parallel import MambaContextParallel as MambaContextParallel
from torch_impl.mamba.mixer import Mamba2Mixer as Mamba2Mixer
from torch_impl.mamba.state_passing import MambaStatePassing as MambaStatePassing
