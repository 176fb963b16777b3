"""`python -m parity_tests.training.small`: the command with a model of two layers, which tests compile in less time."""

from shardproof.cli.app import main
from shardproof.training import run

LAYERS = ("mamba", "attention")

if __name__ == "__main__":
    run.SIZES["layers"] = LAYERS
    main()
