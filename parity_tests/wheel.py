"""Put the files that built-in schemes need into a wheel. hatchling runs this at a build."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FilesOfSchemes(BuildHookInterface):
    """Adds the files to a wheel. An editable install needs none: the folder of the clone is on its path."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        files = runpy.run_path(str(root / "parity_tests" / "files_of_schemes.py"))["files_of_schemes"](root)
        build_data["force_include"] |= {str(file): str(file.relative_to(root)) for file in files}
