"""What pipelining promises where tensor parallelism or FSDP2 adds in another order than one process."""

# |a - b| / |b| of a step's loss and of each parameter's gradient, in float64.
PROMISED = 1e-12
