# A step runs its own backward, so it is never recomputed; torch's own operations follow autocast.
EXCLUDED_CONDITIONS = ("inference_mode", "autocast", "int32", "recomputed")
