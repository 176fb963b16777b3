"""Mixture of experts with the experts sharded over ep: routers, dispatch and combine, capacity, losses, gradients.

Arguments with one meaning throughout the package:

    logits          the router's output, one number for each expert
    k               experts per token; token t has the choices experts[t, 0], ..., experts[t, k - 1]
    experts         expert ids, of any integer dtype
    gates           the factor of each chosen expert's output
    probabilities   the probabilities of all experts, which a router returns for a balance loss
    num_experts     experts on all ranks together
    ep_group        the ranks that the experts are sharded over; each has tokens of its own
    tp_group        the ranks that the columns of each expert, and the tokens, are sharded over
"""

from torch_impl.expert_parallel.balance import global_balance_loss as global_balance_loss
from torch_impl.expert_parallel.balance import load_counts as load_counts
from torch_impl.expert_parallel.balance import rank_balance_loss as rank_balance_loss
from torch_impl.expert_parallel.balance import sequence_balance_loss as sequence_balance_loss
from torch_impl.expert_parallel.balance import token_count as token_count
from torch_impl.expert_parallel.balance import with_loss as with_loss
from torch_impl.expert_parallel.balance import z_loss as z_loss
from torch_impl.expert_parallel.capacity import expert_capacity as expert_capacity
from torch_impl.expert_parallel.capacity import kept_choices as kept_choices
from torch_impl.expert_parallel.exchange_cost import ExchangeCost as ExchangeCost
from torch_impl.expert_parallel.exchange_cost import fewest_exchange_bytes as fewest_exchange_bytes
from torch_impl.expert_parallel.experts import ClampedSwiGLU as ClampedSwiGLU
from torch_impl.expert_parallel.experts import grouped_product as grouped_product
from torch_impl.expert_parallel.gradients import sum_gradients as sum_gradients
from torch_impl.expert_parallel.gradients import sum_layer_gradients as sum_layer_gradients
from torch_impl.expert_parallel.replay import RoutingReplay as RoutingReplay
from torch_impl.expert_parallel.routed_experts import routed_experts as routed_experts
from torch_impl.expert_parallel.routed_experts import shared_experts as shared_experts
from torch_impl.expert_parallel.router import balanced_bias as balanced_bias
from torch_impl.expert_parallel.router import sigmoid_top_k as sigmoid_top_k
from torch_impl.expert_parallel.router import softmax_top_k as softmax_top_k
from torch_impl.expert_parallel.router import top_k_softmax as top_k_softmax
