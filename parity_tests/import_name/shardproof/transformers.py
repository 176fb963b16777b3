"""Small transformers models trained on a mesh, and the JAX decoder that they are compared with."""

from parity_tests.parallelizer.families import Chosen as Chosen
from parity_tests.parallelizer.families import empty as empty
from parity_tests.parallelizer.reference import reference as reference
from parity_tests.parallelizer.training import Training as Training
from parity_tests.parallelizer.training import deviation as deviation
from parity_tests.parallelizer.training import on_mesh as on_mesh
