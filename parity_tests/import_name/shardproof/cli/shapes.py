"""The JSON of each verb, as an example for its page. A test compares its keys with the verb's output."""

from __future__ import annotations

REPORTS = """
{
 "status": 1,
 "reports": [
  {"scheme": "my_scheme_41f0ab:sharded_logprob", "verdict": "mismatch", "ok": false, "examples": 20,
   "shrinking_steps": 31,
   "engine": "lockstep",
   "case": {"format": 1, "scheme": "my_scheme_41f0ab:sharded_logprob", "mesh": {"cp": 1, "tp": 2}, "dims": {"b": 2},
            "dtype": "float32", "layouts": {}, "lengths": {}, "values": {}, "options": {}, "seed": 0,
            "engine": "lockstep", "schedule": 0, "conditions": {"strided": {"hidden": "transposed"}}},
   "tensors": [{"tensor": "d/d hidden", "error": 0.7, "budget": 2e-06, "ratio": 350000.0, "where": [0, 0, 0],
                "dtype": "float32", "ok": false, "notes": ["gradient missing a sum over tp"]}],
   "protocol": [], "cost": [], "hygiene": [], "failure": null, "replay": "replay_f9a714ca.py",
   "left_out": {"tp=4": "v=6 cannot be sharded by contiguous over tp=4 (needs a multiple of 4); pad to 8"},
   "not_drawn": [],
   "confirmed_on": "gloo", "engines_disagree": null, "undecided": 0, "undecided_reason": null,
   "types": "line 31: partial value in relu",
   "shards": "rank 0 has hidden (2,3,4) of 'b s/cp d'",
   "scalars": {"scale": 1.5},
   "implementation": {"judged": ["my_module.sharded_logprob (my_module.py:12)"], "ours": [], "not_applicable": null},
   "expected": {"verdict": "mismatch", "reason": "see issue 12"}}
 ],
 "not_run": {"another_scheme": "is declared for gloo only"},
 "not_judged": {"a_third_scheme": "scheme 'a_third_scheme': its reference raised NameError"},
 "not_offered": {"a_fourth_scheme": "my_module has no sharded_entropy"}MORE
}
"""
SHAPES = {
    "verify": REPORTS.replace("MORE", ""),
    "replay": REPORTS.replace("MORE", ""),
    "tour": REPORTS.replace(
        "MORE",
        """,
 "caught": {"what was injected": true}, "wrong": [], "figure": "shardproof_verify.png\"""",
    ),
    "list": """
[
 {"name": "vocab_parallel_logprob", "mesh": {"tp": [1, 2, 3, 4]},
  "inputs": {"logits": "b s v/tp:ragged", "target": "b s"}, "outputs": {"out": "b s tp=I"},
  "dtypes": ["float32"], "engines": ["lockstep"], "reference": "jax_ref.vocab_parallel.reference.logprob",
  "verifies": ["torch_impl.vocab_parallel.vocab_parallel_logprob"],
  "file": "parity_tests/vocab_parallel/test_logprob.py:30"}
]
""",
    "draw": """
[
 {"name": "sharded_logprob", "mesh": {"cp": 2, "tp": 1}, "dims": {"b": 1, "s": 8, "d": 1, "v": 2},
  "tensors": {"hidden": {"spec": "b s/cp:dual_chunk_swap d tp=I",
                         "owners": {"s/cp:dual_chunk_swap": [0, 0, 1, 1, 1, 1, 0, 0]}, "types": {"tp": "I"}}}}
]
""",
    "timeline": """
{
 "traceEvents": [
  {"name": "all_reduce", "cat": "fwd", "ph": "X", "ts": 0, "dur": 800, "pid": 0, "tid": 0,
   "args": {"group": "tp", "seq": 0, "shapes": [[1, 4]], "dtypes": ["float32"], "bytes_in": 16, "bytes_out": 16,
            "source": "my_scheme.py:48"}}
 ]
}
""",
    "schedule": """
{
 "schedule": "ZBVZeroBubble", "pp": 2, "stage_to_rank": [0, 1, 1, 0], "makespan": 14.0,
 "ranks": [{"idle": 2.0, "bubble": 0.14, "peak_live": 3, "events": [["0F0", 0, 1.0]]}]
}
""",
    "train": """
[
 {"mesh": {"dp_shard": 2}, "dtype": "float64", "mamba": "hidden", "attention": "ring", "schedule": "1F1B",
  "verdict": "equal", "failure": null,
  "steps": [{"step": 1, "loss": 6.116, "reference": 6.116, "wrong": [],
             "rows": {"loss": {"error": 0.0, "budget": 1e-09}}}]}
]
""",
    "trace": """
{
 "status": 1,
 "traces": [
  {"name": "block  float32", "verdict": "mismatch", "first": "output of ln", "home": "ln", "failure": null,
   "torch_only": [], "flax_only": [], "sums": [], "inner": ["output of act"],
   "lines": [{"tensor": "output of ln", "phase": "forward", "home": "ln", "error": 0.0096, "budget": 1.2e-06,
              "ranks": [0], "notes": ["no pattern; worst at (0,0,6)"]}]}
 ]
}
""",
    "cost": """
{
 "links": {"name": "h100", "ranks_per_host": 8, "measured": "not yet measured"},
 "comparisons": [
  {"mesh": {"cp": 64, "tp": 8}, "ranks": 512, "hosts": 64, "least": "ring",
   "candidates": [
    {"label": "ring", "scheme": "attention_in_dual_chunk_swap", "mesh": {"cp": 64, "tp": 8}, "dims": {"s": 131072},
     "dtype": "bfloat16", "options": {"exchange": "ring"}, "drawn": null,
     "lines": [{"phase": "forward", "op": "send", "axis": "cp", "calls": 63, "bytes": 528482304, "inside_bytes": 0.0,
                "between_bytes": 528482304.0, "seconds": 0.012}],
     "inside_bytes": 0.0, "between_bytes": 1585446912.0, "products": [1000, 2500],
     "communication_seconds": {"forward": 0.012, "backward": 0.04},
     "product_seconds": {"forward": 0.01, "backward": 0.03}, "seconds": 0.05}
   ],
   "left_out": {"usp heads=3": "assume rejects ring=8 heads=3"}}
 ]
}
""",
    "plan": """
{
 "mesh": {"tp": 2},
 "parameters": [{"name": "model.embed_tokens.weight", "count": 1, "shape": [151936, 4096],
                 "placements": "dp_shard_cp Shard(0), tp Shard(0)", "local_shape": [75968, 4096],
                 "local_bytes": 622329856}],
 "collectives": [{"phase": "forward", "op": "all_gather", "axis": "tp", "calls": 1, "bytes_in": 622329856}],
 "unmatched": [], "unknown": [], "total_bytes": 3164627456, "local_bytes": 1582326272
}
""",
}
