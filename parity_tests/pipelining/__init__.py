# A step has a backward of its own, so that nobody computes it again; torch's own operations follow autocast.
EXCLUDED_CONDITIONS = ("inference_mode", "autocast", "int32", "recomputed")
