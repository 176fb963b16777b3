"""The tests of both sides, and the evidence. The package that users import is in `import_name`."""

import sys
from pathlib import Path

# Torch's own operations follow autocast, and its losses take targets in int64 alone.
EXCLUDED_CONDITIONS = ("inference_mode", "autocast", "int32")

# A user may have a folder of this name, too. One without `__init__.py` stands behind this one, and is searched as well.
_folders = [Path(entry or ".").absolute() / __name__ for entry in sys.path]
__path__ += [str(folder) for folder in _folders if folder.is_dir() and not (folder / "__init__.py").is_file()]
