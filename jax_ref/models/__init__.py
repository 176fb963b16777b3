"""A hybrid language model on one device: its targets, its loss, and its optimiser."""

from jax_ref.models.reference import LAYERS as LAYERS
from jax_ref.models.reference import Attention as Attention
from jax_ref.models.reference import AttentionLayer as AttentionLayer
from jax_ref.models.reference import Config as Config
from jax_ref.models.reference import Embed as Embed
from jax_ref.models.reference import HybridLM as HybridLM
from jax_ref.models.reference import MambaLayer as MambaLayer
from jax_ref.models.reference import Mlp as Mlp
from jax_ref.models.reference import Norm as Norm
from jax_ref.models.reference import adamw as adamw
from jax_ref.models.reference import aggregated as aggregated
from jax_ref.models.reference import contrastive_loss as contrastive_loss
from jax_ref.models.reference import multi_token_losses as multi_token_losses
from jax_ref.models.reference import next_ids as next_ids
from jax_ref.models.reference import normalised as normalised
from jax_ref.models.reference import rotated as rotated
from jax_ref.models.reference import step_loss as step_loss
from jax_ref.models.reference import token_losses as token_losses
