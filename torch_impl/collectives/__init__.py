"""Differentiable collectives, each with its gradient type, and the mesh view."""

from torch_impl.collectives.accumulator import accumulator as accumulator
from torch_impl.collectives.accumulator import uncast as uncast
from torch_impl.collectives.all_gather import all_gather as all_gather
from torch_impl.collectives.all_reduce import all_reduce as all_reduce
from torch_impl.collectives.all_reduce import all_reduce_max as all_reduce_max
from torch_impl.collectives.all_to_all import all_to_all as all_to_all
from torch_impl.collectives.broadcast import broadcast as broadcast
from torch_impl.collectives.mesh import MeshView as MeshView
from torch_impl.collectives.reduce_scatter import reduce_scatter as reduce_scatter
from torch_impl.collectives.ring_shift import ring_shift as ring_shift
from torch_impl.collectives.ring_shift import start_ring_shift as start_ring_shift
