"""The tests of both sides, the harness that runs them, and the command. What users import is in `import_name`."""

from typing import Any


def __getattr__(name: str) -> Any:
    import shardproof

    return getattr(shardproof, name)
