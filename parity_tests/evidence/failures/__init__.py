"""The failure matrix: kinds of failure on every engine, each with the sentence that a user reads."""
