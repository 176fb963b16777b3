from shardproof.declare.conditions import EXCLUDED_BY_DEFAULT

EXCLUDED_CONDITIONS = EXCLUDED_BY_DEFAULT  # as for any user's code
