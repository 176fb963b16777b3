"""Every public function on the fused core runs on the kernels too: each test replaces `backend_of`, which chooses."""

import pytest

from parity_tests.kernels.device import INTERPRETED
from parity_tests.vocab_parallel.test_cross_entropy import distributed_cross_entropy
from parity_tests.vocab_parallel.test_distillation import distillation_over_tp
from parity_tests.vocab_parallel.test_entropy import chunked_distributed_entropy
from parity_tests.vocab_parallel.test_gather_logprob import gathered_logprob
from parity_tests.vocab_parallel.test_linear_logprob import linear_logprobs
from parity_tests.vocab_parallel.test_logprob import distributed_logprob
from parity_tests.vocab_parallel.test_next_token import next_tokens
from parity_tests.vocab_parallel.test_sampling import logprob_with_sampling
from parity_tests.vocab_parallel.test_softmax import vocab_parallel_log_softmax, vocab_parallel_softmax
from shardproof.draw.choosers import seeded_chooser
from shardproof.draw.drawing import draw_case
from shardproof.verify_one_case import verify_case
from torch_impl.kernels import softmax
from torch_impl.vocab_parallel import fused_logprob

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="not run: a rank's tensors are on the CPU")

STATISTICS, GRADIENT = "local_statistics", "write_gradient"
RADIX_LIMITS = {"top_k": None, "top_p": 0.6}  # a short top-k comes from lists, without statistics
COMPOSITIONS = [
    (distributed_logprob, {}, {STATISTICS, GRADIENT}),
    (chunked_distributed_entropy, {}, {STATISTICS, GRADIENT}),
    (gathered_logprob, {"k": 2}, {STATISTICS, GRADIENT}),
    (vocab_parallel_log_softmax, {}, {STATISTICS}),
    (vocab_parallel_softmax, {}, {STATISTICS}),
    (distributed_cross_entropy, {}, {STATISTICS}),
    (logprob_with_sampling, RADIX_LIMITS, {STATISTICS, GRADIENT}),
    (logprob_with_sampling, {"top_k": 2, "top_p": 1.0}, {GRADIENT}),
    (next_tokens, {"cp": 1}, {STATISTICS, GRADIENT}),
    (linear_logprobs, {}, {STATISTICS, GRADIENT}),
    (distillation_over_tp, {"zero_outside_topk": True, "calculate_entropy": True}, {STATISTICS, GRADIENT}),
]


@pytest.mark.fast_values(3)
@pytest.mark.parametrize(("declared", "sizes", "kernels"), COMPOSITIONS, ids=lambda x: getattr(x, "name", None))
def test_the_kernels_compute_each_composition(declared, sizes, kernels, monkeypatch):
    called = set()

    def recording(name, f):
        def kernel(*args, **options):
            called.add(name)
            return f(*args, **options)

        return kernel

    for name in (STATISTICS, GRADIENT):
        monkeypatch.setattr(softmax, name, recording(name, getattr(softmax, name)))
    monkeypatch.setattr(fused_logprob, "backend_of", lambda options, logits: "triton")
    for seed in range(3):
        case = draw_case(
            declared, seeded_chooser(seed), {"tp": 2, **sizes}, dtype="float32", seed=seed, engine="lockstep"
        )
        verify_case(declared, case).raise_if_failed()
    assert called == kernels
