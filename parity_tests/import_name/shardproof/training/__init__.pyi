from shardproof.tracing.comparison import first as first
from shardproof.training.follow import ReferenceSteps as ReferenceSteps
from shardproof.training.run import Run as Run
from shardproof.training.session import followed as followed
from shardproof.training.traced import trace as trace
from shardproof.training.traced import trace_reference as trace_reference
