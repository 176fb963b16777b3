"""What happens between a sharded gradient and the next weights: the norm over every mesh, and clipping by it."""

from torch_impl.optimizers.clipping import clip_grad_norm_ as clip_grad_norm_
from torch_impl.optimizers.clipping import gradient_norm as gradient_norm
