"""`python -m shardproof` runs the command, under a name that torchrun can start."""

from shardproof import main

if __name__ == "__main__":
    main()
