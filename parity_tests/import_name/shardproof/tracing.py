"""Find where a model first differs from its reference: the parts of `trace`, and a model with a bug."""

from parity_tests.tracing import buggy_model as buggy_model
from parity_tests.tracing.buggy_model import TP as TP
from parity_tests.tracing.buggy_model import Model as Model
from parity_tests.tracing.buggy_model_reference import batch as batch
from parity_tests.tracing.buggy_model_reference import drawn_weights as drawn_weights
from parity_tests.tracing.buggy_model_reference import full_model as full_model
from parity_tests.tracing.flax_side import traced as traced
from parity_tests.tracing.lines import Found as Found
from parity_tests.tracing.lines import first as first
from parity_tests.tracing.lines import lines as lines
from parity_tests.tracing.torch_side import recorded as recorded
