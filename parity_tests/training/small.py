"""`python -m parity_tests.training.small`: the command with a model of two layers, which tests compile in less time."""

from parity_tests.cli.app import main
from parity_tests.training import run

LAYERS = ("mamba", "attention")

if __name__ == "__main__":
    run.SIZES["layers"] = LAYERS
    main()
