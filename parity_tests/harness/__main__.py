"""`python -m parity_tests.harness` is the command shardproof."""

from parity_tests.cli.app import main

if __name__ == "__main__":
    main()
