"""References for pipelines: the assignment of layers and stages, and the costs of schedules in closed form."""

from jax_ref.pipelining.reference import accumulate as accumulate
from jax_ref.pipelining.reference import bubble as bubble
from jax_ref.pipelining.reference import dearest_stage_first as dearest_stage_first
from jax_ref.pipelining.reference import idle as idle
from jax_ref.pipelining.reference import layer_counts as layer_counts
from jax_ref.pipelining.reference import live_bound as live_bound
from jax_ref.pipelining.reference import live_chunks as live_chunks
from jax_ref.pipelining.reference import stage_ids_this_rank as stage_ids_this_rank
from jax_ref.pipelining.reference import stages_by_search as stages_by_search
