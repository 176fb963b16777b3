"""Differentiable collectives with stated gradient types, and the mesh as one rank sees it."""

from torch_impl.collectives.exchanges import all_to_all as all_to_all
from torch_impl.collectives.exchanges import ring_shift as ring_shift
from torch_impl.collectives.exchanges import start_ring_shift as start_ring_shift
from torch_impl.collectives.gathers import all_gather as all_gather
from torch_impl.collectives.gathers import reduce_scatter as reduce_scatter
from torch_impl.collectives.gradient_types import convert as convert
from torch_impl.collectives.gradient_types import reinterpret as reinterpret
from torch_impl.collectives.mesh import MeshView as MeshView
from torch_impl.collectives.plain import accumulator as accumulator
from torch_impl.collectives.plain import no_autocast as no_autocast
from torch_impl.collectives.reductions import all_reduce as all_reduce
from torch_impl.collectives.reductions import all_reduce_max as all_reduce_max
from torch_impl.collectives.reductions import broadcast as broadcast
