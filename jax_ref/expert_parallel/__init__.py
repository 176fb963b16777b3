"""A mixture of experts on one device: routers, experts, capacity, balance losses."""

from jax_ref.expert_parallel.reference import balance_loss as balance_loss
from jax_ref.expert_parallel.reference import balanced_bias as balanced_bias
from jax_ref.expert_parallel.reference import clamped_swiglu as clamped_swiglu
from jax_ref.expert_parallel.reference import gate_matrix as gate_matrix
from jax_ref.expert_parallel.reference import kept_by_position as kept_by_position
from jax_ref.expert_parallel.reference import kept_by_probability as kept_by_probability
from jax_ref.expert_parallel.reference import load_counts as load_counts
from jax_ref.expert_parallel.reference import mixture as mixture
from jax_ref.expert_parallel.reference import mixture_with_biases as mixture_with_biases
from jax_ref.expert_parallel.reference import replayed as replayed
from jax_ref.expert_parallel.reference import sequence_balance_loss as sequence_balance_loss
from jax_ref.expert_parallel.reference import sigmoid_top_k as sigmoid_top_k
from jax_ref.expert_parallel.reference import softmax_top_k as softmax_top_k
from jax_ref.expert_parallel.reference import swiglu as swiglu
from jax_ref.expert_parallel.reference import top_k_softmax as top_k_softmax
from jax_ref.expert_parallel.reference import z_loss as z_loss
