"""Differentiable collectives, each with its gradient type, and the mesh view."""

from torch_impl.collectives.mesh import MeshView as MeshView
