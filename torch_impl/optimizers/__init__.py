"""From a sharded gradient to the next weights: the gradient norm over every mesh, clipping, the optimizer's step."""

from torch_impl.optimizers.clipping import clip_grad_norm_ as clip_grad_norm_
from torch_impl.optimizers.clipping import gradient_norm as gradient_norm
from torch_impl.optimizers.muon import Muon as Muon
from torch_impl.optimizers.newton_schulz import fewest_bytes as fewest_bytes
from torch_impl.optimizers.newton_schulz import newton_schulz as newton_schulz
from torch_impl.optimizers.parameter_kinds import ParameterKinds as ParameterKinds
from torch_impl.optimizers.parameter_kinds import parameter_kinds as parameter_kinds
from torch_impl.optimizers.replica_gradients import ReplicaGradients as ReplicaGradients
from torch_impl.optimizers.zero1 import Zero1 as Zero1
