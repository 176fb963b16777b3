"""Parity of vocab_parallel.adapters.gpt_model: the patched forward of a model with GPTModel's structure."""

from types import SimpleNamespace

import jax.numpy as jnp
from torch import nn

from jax_ref.vocab_parallel import linear_next_token_logprob
from parity_tests.parity import parity
from parity_tests.vocab_parallel.costs import all_gathers, over_tp
from parity_tests.vocab_parallel.ignored_rows import SOME_IGNORED
from shardproof import Cost, offsets, scheme, values
from torch_impl.vocab_parallel import patch_gpt_model_forward_for_linear_ce_fusion as patch

FLOATS = values("normal", "zeros", "ones", "iota", "ties", "tiny")
PREPROCESSED = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset", "padding_mask")
CALLER_ARGUMENTS = {"attention_mask": "mask", "more": "more"}


class Decoder(nn.Module):
    """Doubles the hidden states; asserts that it gets the results of `_preprocess` and the caller's own arguments."""

    def __init__(self, expected):
        super().__init__()
        self.expected = expected

    def forward(self, hidden_states, **seen):
        assert seen == self.expected, seen
        return 2 * hidden_states


def model_class():
    """A new class for each call: a patch changes the class, and lockstep runs all ranks in one process."""

    class Model(nn.Module):
        def __init__(self, mesh, weight, tied, results, expected):
            super().__init__()
            self.config = SimpleNamespace(fine_grained_activation_offloading=results == 7)
            self.pg_collection, self.offloads = SimpleNamespace(tp=mesh["tp"], cp=mesh["cp"]), False
            self.post_process, self.share_embeddings_and_output_weights = True, tied
            self.decoder, self.results, self.weight = Decoder(expected), results, weight
            self.output_layer = SimpleNamespace(bias=None, weight=None if tied else weight)

        def shared_embedding_or_output_weight(self):
            return self.weight if self.share_embeddings_and_output_weights else None

        def preprocess_for_fine_grained_offloading(self):
            self.offloads = True

        def _preprocess(self, *, decoder_input, padding_mask, **_):
            return (decoder_input, *PREPROCESSED[:4], padding_mask, "both")[: self.results]

        def forward(self, *tokens, **keywords):
            return tokens, keywords

    return Model


def fused_scores(mesh, hidden, weight, target, chunk_size, tied, results, context, inherits, packed=None):
    """The scores of a patched model; asserts that it passes any other call on, and that the patch is undone."""
    base = model_class()
    patched = type("Heir", (base,), {}) if inherits else base
    before = dict(vars(patched))
    inference = dict.fromkeys(["inference_context", "inference_params"], None) | ({context: "now"} if context else {})
    expected = (
        {name: name for name in PREPROCESSED}
        | CALLER_ARGUMENTS
        | {"rotary_pos_cos_sin": "both" if results == 7 else None}
    )
    expected |= {"packed_seq_params": packed, "inference_context": "now" if context else None}
    model = patched(mesh, weight, tied, results, expected).train(context is not None)
    with patch(chunk_size=5, model_class=patched), patch(chunk_size=chunk_size, model_class=patched):
        tokens, mask = [target.clone() for _ in range(5)], target > 0
        passed_on, keywords = model(*tokens[:4], labels=tokens[4], is_spec_decode=True, padding_mask=mask)
        assert [*map(id, passed_on)] == [*map(id, (*tokens, *[None] * 4))]
        assert keywords["padding_mask"] is mask and keywords["is_spec_decode"] is True and len(keywords) == 2
        scores = model(
            tokens[0],
            tokens[1],
            CALLER_ARGUMENTS["attention_mask"],
            hidden,
            target,
            packed_seq_params=packed,
            extra_block_kwargs={"more": CALLER_ARGUMENTS["more"]},
            padding_mask="padding_mask",
            return_logprobs_for_linear_ce_fusion=True,
            **inference,
        )
    assert dict(vars(patched)) == before and model.offloads == (results == 7)
    return scores


def scores_of_model(hidden, weight, target):
    return linear_next_token_logprob(2 * hidden, weight, target)


def cost(c):
    """Forward gathers 3 numbers per token over tp, the scores over cp; backward sums d hidden and the cotangents."""
    n, size = c.b * c.s // c.cp, c.accumulator_itemsize
    return Cost(
        forward=all_gathers(over_tp(c, 3 * n), over_cp=[(1, n * size)]),
        backward={"all_reduce/tp": (1, n * c.d * size), "reduce_scatter/cp": (1, c.b * c.s * size)},
    )


COMMON = dict(
    mesh={"cp": (1, 2), "tp": (1, 2)},
    outputs="b u tp=I cp=R",
    rank_options={
        "chunk_size": (None, 1, 3),
        "tied": (False, True),
        "results": (7, 6),
        "context": (None, "inference_context", "inference_params"),
        "inherits": (False, True),
    },
    dtypes=("float32", "float64", "bfloat16"),
    reduction=("v", "d"),
    roundings=4,  # logits, d logits, this rank's term of d hidden, the result
    cost=cost,
)
DRAWS = {"hidden": FLOATS, "weight": FLOATS, "target": SOME_IGNORED}
SIZES = {"v": (8, 12), "d": (3, 5), "u": "s-1"}


@scheme(
    reference=scores_of_model,
    inputs={"hidden": "s/cp:dual_chunk_swap b d tp=I", "weight": "v/tp d cp=R", "target": "b s"},
    dims=SIZES,
    draw=DRAWS,
    **COMMON,
)
def fused_model(mesh, hidden, weight, target, chunk_size, tied, results, context, inherits):
    return fused_scores(mesh, hidden, weight, target, chunk_size, tied, results, context, inherits)


def scores_of_packed_model(hidden, weight, target, padded):
    """The scores of one sequence, but 0 where the next token belongs to another sequence."""
    scores = scores_of_model(hidden, weight, target)
    is_end = (jnp.arange(scores.shape[1])[:, None] == padded[None, 1:] - 1).any(1)
    return jnp.where(is_end, 0.0, scores)


@scheme(
    reference=scores_of_packed_model,
    inputs={"hidden": "s/cp:packed b d tp=I", "weight": "v/tp d cp=R", "target": "b s", "padded": "n"},
    dims={**SIZES, "b": (1,), "s": (24, 16), "n": (4, 3)},
    draw={**DRAWS, "padded": offsets("s", padded=True)},
    **{**COMMON, "rank_options": {**COMMON["rank_options"], "is_padded_alone": (False, True)}},
)
def fused_packed_model(
    mesh, hidden, weight, target, padded, chunk_size, tied, results, context, inherits, is_padded_alone
):
    packed = SimpleNamespace(cu_seqlens_q=padded if is_padded_alone else padded // 2)
    packed.cu_seqlens_q_padded = None if is_padded_alone else padded
    return fused_scores(mesh, hidden, weight, target, chunk_size, tied, results, context, inherits, packed)


test_parity = parity([fused_model, fused_packed_model], lockstep=20, gloo=4)
