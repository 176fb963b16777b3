"""Injected bugs of the names that others call: the patched forward of a GPTModel, routes by arguments."""

from parity_tests.injected_bugs.injected_bug import InjectedBug

BUGS = (
    # The patched forward of a GPTModel
    InjectedBug(
        name="offsets of real lengths in place of the padded ones",
        kind="sequence",
        at="vocab_parallel:_score",
        old='("cu_seqlens_q_padded", "cu_seqlens_q")',
        new='("cu_seqlens_q", "cu_seqlens_q_padded")',
        expect="value: ",
    ),
    InjectedBug(
        name="a range that starts by the rank of cp",
        kind="group",
        at="vocab_parallel:_score",
        old="start = tp_group.rank() * len(weight)",
        new="start = (cp_group or tp_group).rank() * len(weight)",
        expect="value: ",
    ),
    InjectedBug(
        name="a patch that leaves an inherited forward behind",
        kind="call",
        at="vocab_parallel:Patch.unpatch",
        old="            del self.model_class.forward",
        new="            self.model_class.forward = fusion.original",
        expect="raised: ",
    ),
    # The route that the arguments name
    InjectedBug(
        name="sampling parameters lost on the way to DTensor logits",
        kind="call",
        at="vocab_parallel:get_next_token_logprobs_from_logits",
        old="score_dtensor(next_token_logits, input_ids, seq_index, chunk_size, sampling_params, with_entropy)",
        new="score_dtensor(next_token_logits, input_ids, seq_index, chunk_size, None, with_entropy)",
        expect="value: ",
    ),
    InjectedBug(
        name="an applied gather of another dim",
        kind="border",
        at="vocab_parallel:AllGatherCPTensor.forward",
        old="GatherOverCp.forward(ctx, tensor, cp_group, seq_dim)",
        new="GatherOverCp.forward(ctx, tensor, cp_group, 1)",
        expect="raised: ",
    ),
)
